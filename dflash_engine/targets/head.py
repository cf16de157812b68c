"""A target's head over a part of its tokens, which costs that part of the time."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from .target import Target


def head_over(target: Target, ids: NDArray[np.integer]) -> Callable[[mx.array], mx.array]:
    """Hidden states [..., hidden] to logits [..., n] of the ``n`` tokens ``ids`` alone, as
    ``target``'s own head gives them, but for rounding where that is quantised.
    """
    head, rows = target.head, mx.array(ids)
    if isinstance(head, nn.QuantizedLinear):
        biases = None if head.biases is None else head.biases[rows]
        weight = mx.dequantize(
            head.weight[rows],
            head.scales[rows],
            biases,
            group_size=head.group_size,
            bits=head.bits,
            mode=head.mode,
        )
    elif isinstance(head, nn.Linear):
        weight = head.weight[rows]
    else:
        weight = target.embedding(rows)  # tied
    bias = head.bias[rows] if isinstance(head, nn.Module) and "bias" in head else 0
    mx.eval(weight)
    return lambda hidden: hidden @ weight.T + bias
