"""Many blocks of one text in one forward pass of the draft.

The layers are those that draft, called as they are when they draft; only where each block's rows
stand and what they see is said differently. So training and inference cannot disagree.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from ..drafters.block_checkpoint import BlockConfig
from ..drafters.block_model import BlockModel
from ..targets import Target


class Blocks:
    """A draft ``model`` of ``config`` in training, and the ``target`` whose tables it borrows."""

    def __init__(self, model: BlockModel, config: BlockConfig, target: Target) -> None:
        self.model, self.config, self.target = model, config, target
        self._scale = config.embedding_scale * target.embedding_scale

    def hidden(self, tokens: Sequence[int], anchors: Sequence[int], features: mx.array) -> mx.array:
        """Hidden states [A, block size - 1, hidden], fp32, of the slots after each of A anchors.

        ``anchors`` are indices of ``tokens``, none of them 0. ``features`` [1, S, taps x hidden]
        are of the tokens' first S positions, up to the last anchor's at least; a block sees those
        before its anchor, and itself.
        """
        size, context = self.config.block_size, max(anchors)
        masks = [self.config.mask_token] * (size - 1)
        blocks = mx.array([[tokens[anchor], *masks] for anchor in anchors])
        x = self.target.embedding(blocks).astype(mx.float32) * self._scale
        x = x.reshape(1, len(anchors) * size, -1)
        contexts = self.model.make_contexts()
        self.model.observe(features[:, :context].astype(mx.float32), contexts)
        starts = mx.array(list(anchors))
        rope, mask = _AtAnchors(self.model.rope, starts), visible(starts, size, context)
        for layer, known in zip(self.model.layers, contexts, strict=True):
            x = layer(x, rope, known, mask)
        return self.model.norm(x).reshape(len(anchors), size, -1)[:, 1:]  # type: ignore[no-any-return]


class _AtAnchors:
    """The rotation of A blocks, which stand one behind the other in a row but not in the text."""

    def __init__(self, rope: Any, anchors: mx.array) -> None:
        self._rope, self._anchors = rope, anchors

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        """Rotate ``x`` [1, heads, A x rows, dim], each block from its anchor on."""
        _, heads, rows, dim = x.shape
        blocks = x.reshape(heads, self._anchors.size, -1, dim).transpose(1, 0, 2, 3)
        blocks = cast(mx.array, self._rope(blocks, offset=self._anchors))
        return blocks.transpose(1, 0, 2, 3).reshape(1, heads, rows, dim)


def visible(anchors: mx.array, size: int, context: int) -> mx.array:
    """What rows of blocks of ``size`` see [A x size, context + A x size], as a mask of booleans:
    the context's positions before their ``anchors`` [A], and their own block.
    """
    before = mx.arange(context)[None] < mx.repeat(anchors, size)[:, None]
    block = mx.arange(anchors.size * size) // size
    return mx.concatenate([before, block[:, None] == block[None]], axis=1)
