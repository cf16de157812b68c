"""Whether several tokens in one forward give what one at a time gives, and how nearly.

Run when a target is loaded, whatever the drafter: a cache kind taken back wrongly, or a mask that
does not fit several rows, shows here and not in an answer.
"""

from typing import TYPE_CHECKING

import mlx.core as mx

from ..errors import UnsupportedTargetError
from . import dense, hybrid, rotating
from .cache import leaves

if TYPE_CHECKING:
    from .target import Target

# Of the logits' spread, root mean square: what rounding may do. A wrong mask does 0.1 to 1.
_ROUNDING = {mx.float32: 1e-3}
_ROUNDING_16 = 0.1


def runs(target: "Target") -> None:
    """Raise UnsupportedTargetError if a forward with the target's kind of cache fails: some layers
    take no quantised keys and values.
    """
    try:
        for tokens in ([0, 1], [0]):
            mx.eval(target.forward(tokens, target.make_cache(), undoable=False)[0])
    except (ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        hint = ": leave kv_bits unset" if target.kv_bits else ""
        raise UnsupportedTargetError(f"{target.name} does not run: {error}{hint}") from error


def cache_kinds(target: "Target") -> None:
    """Raise UnsupportedTargetError for caches whose rows cannot be taken back, by name."""
    caches = target.make_cache().layers
    known = (dense, rotating, hybrid)
    unknown = {type(c).__name__ for c in leaves(caches) if not any(k.handles(c) for k in known)}
    if unknown:
        raise UnsupportedTargetError(
            f"{target.name} keeps {', '.join(sorted(unknown))}, whose rejected rows this version "
            "cannot take back: use drafter='none'"
        )
    too_wide = rotating.too_wide_a_mask(target.model, caches)
    if too_wide:
        raise UnsupportedTargetError(
            f"{target.name}: its masks let several rows see {too_wide[0]} positions, its cache "
            f"keeps {too_wide[1]} for one: it reads text otherwise than it writes it, and "
            "speculation would change its answers: use drafter='none'"
        )


def width_error(target: "Target") -> float:
    """The largest difference of a logit; UnsupportedTargetError where it is more than rounding."""
    # So many that attention takes more than one of the tiles by which some kernels divide it.
    tokens = [(17 + 7919 * i) % target.vocab_size for i in range(88)]
    prompt, answer, wrong = tokens[:72], tokens[72:76], tokens[76:]

    cache = target.make_cache()
    target.forward(prompt, cache, undoable=False)
    single = [target.forward([token], cache)[0] for token in answer]

    cache = target.make_cache()
    target.forward(prompt, cache, undoable=False)
    several = [target.forward([answer[0], *wrong], cache)[0][:, :1]]
    cache.roll_back(len(wrong))
    several.append(target.forward(answer[1:], cache)[0])

    expected = mx.concatenate(single, axis=1).astype(mx.float32)
    difference = mx.concatenate(several, axis=1).astype(mx.float32) - expected
    share = float(mx.sqrt(mx.mean(difference * difference)) / mx.std(expected))
    if not share <= _ROUNDING.get(single[0].dtype, _ROUNDING_16):
        raise UnsupportedTargetError(
            f"{target.name}: several tokens in one forward do not give what one at a time gives: "
            f"the logits differ by {share:.2g} of their spread. Speculation would change its "
            "answers: use drafter='none'"
        )
    # A probe can happen on equal numbers: what the type cannot tell apart is never less.
    rounding = mx.finfo(single[0].dtype).eps * float(mx.abs(expected).max())
    return max(float(mx.abs(difference).max()), rounding)
