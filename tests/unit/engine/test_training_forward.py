"""Many blocks in one forward are what one block is when it drafts, and see no more."""

from pathlib import Path

import mlx.core as mx
import pytest
import tiny
import tiny_drafts

from dflash_engine.drafters.block import Block
from dflash_engine.targets import Target, load
from dflash_engine.training.forward import Blocks, visible

TOKENS = list(b"Words of a text, and where its answer starts.")
ANCHORS = [1, 7, 8, 30, len(TOKENS) - 1]


@pytest.fixture(params=["llama", "qwen3"])
def block(request: pytest.FixtureRequest, tmp_path: Path) -> Block:
    target = load(getattr(tiny, request.param)(), request.param)
    return Block(tiny.write_draft(tmp_path / "draft", *tiny_drafts.zlab()), target)


def features(target: Target, tokens: list[int]) -> mx.array:
    found = target.forward(tokens, target.make_cache())[1]
    assert found is not None
    return found


def logits(block: Block, tokens: list[int], anchors: list[int] = ANCHORS) -> mx.array:
    blocks = Blocks(block.model, block.config, block.target)
    return block.target.head(blocks.hidden(tokens, anchors, features(block.target, tokens)))


def drafting(block: Block, tokens: list[int], anchor: int) -> mx.array:
    """The logits that the decode loop's own forward gives."""
    contexts = block.model.make_contexts()
    block.model.observe(features(block.target, tokens)[:, :anchor], contexts)
    return block.fill([tokens[anchor]], block.config.slots, contexts)[1]


def test_each_blocks_logits_are_those_of_drafting(block: Block) -> None:
    together = logits(block, TOKENS)
    for anchor, own in zip(ANCHORS, together, strict=True):
        expected = drafting(block, TOKENS, anchor)
        assert mx.abs(own - expected).max().item() < 1e-4
        assert mx.abs(expected).max().item() > 1


def test_with_a_scaled_embedding_and_bf16_weights_of_the_target(tmp_path: Path) -> None:
    target = load(tiny.model("gemma3_text"), "gemma3")
    assert target.embedding_scale > 1
    config, weights = tiny_drafts.zlab(dflash_config={"input_embedding_scale": 0.5})
    block = Block(tiny.write_draft(tmp_path / "draft", config, weights), target)
    for anchor, own in zip(ANCHORS, logits(block, TOKENS), strict=True):
        assert mx.abs(own - drafting(block, TOKENS, anchor)).max().item() < 1e-4


def test_a_block_sees_what_is_before_its_anchor_and_nothing_after(block: Block) -> None:
    anchor = 20
    plain = logits(block, TOKENS, [5, anchor])
    for place in range(len(TOKENS)):
        changed = TOKENS.copy()
        changed[place] = 200
        moved = mx.abs(logits(block, changed, [5, anchor]) - plain).max(axis=(1, 2))
        assert (moved > 1e-3).tolist() == [place <= 5, place <= anchor]


def test_blocks_do_not_see_each_other(block: Block) -> None:
    alone = logits(block, TOKENS, [30])
    for others in ([2, 30], [29, 30], [30, 31], [30, 44]):
        own = logits(block, TOKENS, others)[others.index(30)]
        assert mx.abs(own - alone[0]).max().item() < 1e-4


def test_the_mask_by_hand() -> None:
    rows = ["".join(".x"[bool(seen)] for seen in row) for row in visible(mx.array([1, 3]), 2, 3)]
    assert rows == ["x..xx..", "x..xx..", "xxx..xx", "xxx..xx"]
