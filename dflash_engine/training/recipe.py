"""How a draft is trained, and for how long."""

from dataclasses import dataclass

from .loss import Loss

_DECAY = Loss()


@dataclass(frozen=True)
class Recipe:
    """What the weights depend on, beside the data.

    A step takes ``batch`` sequences, and up to ``anchors`` blocks of each. The learning rate rises
    over the share ``warmup`` of the steps and falls as a cosine. ``vocabulary``: the tokens over
    which the softmax is taken, all of them by default; labels outside are dropped. ``sources``: the
    target's layers that the draft's begin as, one each; every other late one by default.
    """

    steps: int = 2000
    batch: int = 8
    anchors: int = 16
    learning_rate: float = 6e-4
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    loss: Loss = _DECAY
    vocabulary: tuple[int, ...] | None = None
    sources: tuple[int, ...] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Limits:
    """When to look, save and stop, in steps.

    Training stops once ``patience`` evaluations in a row were no better than the best, or
    ``seconds`` are spent, those of earlier, interrupted runs included. Hidden states are kept on
    disk up to ``feature_bytes``.
    """

    evaluate_every: int = 100
    save_every: int = 100
    patience: int | None = 5
    seconds: float | None = None
    feature_bytes: int = 8 << 30
