"""One measured answer, whoever gave it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Answer:
    """The ``tokens`` of an answer, stop token included, and the seconds to the ``first`` and to the
    last of them (``total``). ``rounds``: target forwards after the first token, where they are
    told. ``kept``: tokens by the drafter they came from. ``widths``: tokens checked in each round.
    ``peak``: most bytes that MLX held.
    """

    tokens: list[int]
    first: float
    total: float
    rounds: int | None = None
    kept: dict[str, int] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    peak: int = 0

    @property
    def decoding(self) -> float:
        """Seconds from the first token to the last."""
        return self.total - self.first
