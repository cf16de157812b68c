"""What DFlash 2 adds to the draft network: dynamic convolutions, and a selector of candidates.

Source: the authors' description of DFlash 2 (Inco AI, "DFlash 2: Keep Drafting Parallel", August
2026) and their published drafts.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class Block2Config:
    """``conv_kernel_size`` rows are mixed, ``conv_group_size`` channels share a dynamic weight;
    the selector compares ``selector_top_k`` tokens a slot by vectors of ``selector_rank``.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


class DynamicConvolution(nn.Module):
    """A causal convolution along the block before a sublayer, and one after it.

    Weights are fixed ones a channel, plus dynamic ones a row and group of channels, which are
    projected from the sublayer's input for both. Rows before the block count as zero.
    """

    def __init__(self, hidden_size: int, config: Block2Config) -> None:
        super().__init__()
        self._shape = (config.conv_kernel_size, hidden_size // config.conv_group_size)
        self.base_kernel = mx.zeros((2, config.conv_kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(
            hidden_size, 2 * self._shape[0] * self._shape[1], bias=False
        )

    def prepare(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The sublayer's input for ``x`` [1, rows, hidden], and the dynamic weights to finish."""
        dynamic = self.kernel_projection(x).reshape(1, x.shape[1], 2, *self._shape, 1)
        return self._convolve(x, self.base_kernel[0], dynamic[:, :, 0]), dynamic[:, :, 1]

    def finish(self, y: mx.array, dynamic: mx.array) -> mx.array:
        """What the sublayer adds, given its output ``y`` [1, rows, hidden]."""
        return self._convolve(y, self.base_kernel[1], dynamic)

    def _convolve(self, x: mx.array, base: mx.array, dynamic: mx.array) -> mx.array:
        rows = x.shape[1]
        taps, groups = self._shape
        fixed = base.reshape(taps, groups, -1).astype(x.dtype)
        grouped = x.reshape(1, rows, groups, -1)
        mixed = fixed[0] * grouped + dynamic[:, :, 0] * grouped
        for tap in range(1, taps):
            earlier = mx.pad(grouped, [(0, 0), (tap, 0), (0, 0), (0, 0)])[:, :rows]
            mixed = mixed + fixed[tap] * earlier + dynamic[:, :, tap] * earlier
        return mixed.reshape(x.shape)


class CandidateSelector(nn.Module):
    """Scores of a slot's likeliest tokens, each after every candidate of the slot before.

    A slot's logits do not know what the slot before was filled with; this does. The score of b
    after a is logit(b) + <A[a] * P(hidden), B[b]>, with codebooks A and B and a projection P.
    """

    def __init__(self, hidden_size: int, vocab_size: int, config: Block2Config) -> None:
        super().__init__()
        self._top_k = config.selector_top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(vocab_size, config.selector_rank)
        self.hidden_projection = nn.Linear(hidden_size, config.selector_rank, bias=False)

    def __call__(
        self, hidden: mx.array, logits: mx.array, anchor: int
    ) -> tuple[mx.array, mx.array]:
        """Candidates [n, k] of n slots, and scores [n, k, k].

        ``hidden`` is [n, hidden], ``logits`` [n, vocab]. ``scores[t, a, b]`` is of candidate b of
        slot t after candidate a of slot t - 1; in slot 0 it is after the anchor, whatever a.
        """
        candidates = mx.argpartition(logits, -self._top_k, axis=-1)[:, -self._top_k :]
        unary = mx.take_along_axis(logits, candidates, axis=-1)
        first = mx.full((1, self._top_k), anchor, dtype=candidates.dtype)
        before = mx.concatenate([first, candidates[:-1]])
        context = self.predecessor_codebook(before) * self.hidden_projection(hidden)[:, None]
        edges = context @ self.successor_codebook(candidates).swapaxes(1, 2)
        return candidates, unary[:, None] + edges
