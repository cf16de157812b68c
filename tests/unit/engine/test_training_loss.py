"""Labels, weights and the softmax, by hand."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny

from dflash_engine.targets import load
from dflash_engine.training.features import Seen
from dflash_engine.training.loss import NONE, Head, Loss, decay, dpace, expectations, labels
from dflash_engine.training.recipe import Recipe
from dflash_engine.training.trainer import learning_rate


def nothing(wanted: mx.array) -> tuple[mx.array, mx.array]:
    """A target that held nothing likely, for labels ``wanted``."""
    ids = mx.full((*wanted.shape, 2), NONE)
    return ids, mx.ones(ids.shape)


def test_slot_k_is_for_the_token_k_places_after_the_anchor() -> None:
    tokens = [10, 11, 12, 13, 14]
    assert labels(tokens, [1, 3], 4).tolist() == [[12, 13, 14], [14, NONE, NONE]]


def test_decay_falls_by_the_distance() -> None:
    expected = [1.0, math.exp(-1 / 4), math.exp(-2 / 4)]
    assert decay(3, 4.0).tolist() == pytest.approx(expected)


def test_dpace_sums_the_products_from_each_slot_on() -> None:
    # Smoothed to 0.6, 0.75, 1: products 0.6, 0.45, 0.45.
    weights = dpace(mx.array([[0.2, 0.5, 1.0]]), mx.ones((1, 3)), 0.5)
    assert weights[0].tolist() == pytest.approx([1.5, 0.9, 0.45])
    # Without the last slot; the weights of the others do not count it.
    weights = dpace(mx.array([[0.2, 0.5, 1.0]]), mx.array([[1.0, 1.0, 0.0]]), 0.5)
    assert weights[0].tolist() == pytest.approx([1.05, 0.45, 0.0])


def test_dpace_gives_no_gradient_through_its_weights() -> None:
    gradient = mx.grad(lambda p: dpace(p, mx.ones((1, 3)), 0.5).sum())(mx.full((1, 3), 0.5))
    assert not gradient.any().item()


def test_the_sum_and_its_divisor_by_hand() -> None:
    logits = mx.log(mx.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], [[0.2, 0.7, 0.1], [1, 1, 1]]]))
    wanted = mx.array([[0, 2], [1, NONE]])
    entropy = [-math.log(0.5), -math.log(0.8), -math.log(0.7)]
    far = math.exp(-1 / 7)
    total, whole = Loss("decay", gamma=7.0, soft=0.0)(logits, wanted, *nothing(wanted))
    assert total.item() == pytest.approx(entropy[0] + far * entropy[1] + entropy[2], rel=1e-5)
    assert whole.item() == pytest.approx(2 + far)
    total, whole = Loss("dpace", alpha=0.5, soft=0.0)(logits, wanted, *nothing(wanted))
    smoothed = [0.75, 0.9, 0.85]
    both = smoothed[0] * smoothed[1]
    expected = (smoothed[0] + both) * entropy[0] + both * entropy[1] + smoothed[2] * entropy[2]
    assert (total.item(), whole.item()) == (pytest.approx(expected, rel=1e-5), 2)


def test_a_share_of_the_loss_is_with_what_the_target_held_likely() -> None:
    logits = mx.log(mx.array([[[0.5, 0.25, 0.25]], [[0.2, 0.7, 0.1]]]))
    wanted = mx.array([[0], [1]])
    expected = mx.array([[[0, 2]], [[NONE, 0]]])  # a token that the draft does not have
    shares = mx.array([[[0.6, 0.3]], [[0.9, 0.1]]])
    total, whole = Loss("decay", soft=0.25)(logits, wanted, expected, shares)
    hard = -math.log(0.5) - math.log(0.7)
    soft = -0.6 * math.log(0.5) - 0.3 * math.log(0.25) - 0.1 * math.log(0.2)
    assert total.item() == pytest.approx(0.75 * hard + 0.25 * soft, rel=1e-5)
    assert whole.item() == 2


def test_what_the_target_held_likely_stands_where_the_labels_stand() -> None:
    # An answer of four tokens, from index 5 on; the likely ones for each are its own number.
    ids = mx.array([[[i, 10 * i]] for i in range(4)])[:, 0]
    seen = Seen(mx.zeros((1, 9, 1)), ids, ids.astype(mx.float16) / 64)
    tokens = [0, 0, 0, 0, 0, 90, 91, 92, 93]
    assert labels(tokens, [5, 7], 4).tolist() == [[91, 92, 93], [93, NONE, NONE]]
    found, shares = expectations(seen, [0, 2], 4)
    none = [NONE, NONE]
    assert found.tolist() == [[[1, 10], [2, 20], [3, 30]], [[3, 30], none, none]]
    assert (64 * shares).tolist() == [[[1, 10], [2, 20], [3, 30]], [[3, 30], [0, 0], [0, 0]]]


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_what_has_no_label_gives_no_gradient(kind: str) -> None:
    logits = mx.random.normal((3, 4, 9), key=mx.random.key(0))
    wanted = mx.array([[1, 2, NONE, 3], [NONE] * 4, [4, NONE, NONE, NONE]])
    loss = Loss(kind)  # type: ignore[arg-type]
    likely = mx.broadcast_to(mx.array([5, NONE]), (*wanted.shape, 2))
    gradient = mx.grad(lambda x: loss(x, wanted, likely, mx.ones(likely.shape))[0])(logits)
    moved = mx.abs(gradient).sum(axis=-1) > 0
    assert moved.tolist() == (wanted >= 0).tolist()


@pytest.mark.parametrize("quantised", [False, True], ids=["dense", "quantised"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # a tied head, and one of its own
def test_a_part_of_the_vocabulary_gives_those_logits_of_the_whole(
    kind: str, quantised: bool
) -> None:
    target = load(getattr(tiny, kind)(), kind)
    if quantised:
        nn.quantize(target.model, group_size=32, bits=4)
    ids = [200, 7, 3, 90]
    hidden = mx.random.normal((1, 5, tiny.HIDDEN), key=mx.random.key(1))
    whole, part = Head(target), Head(target, ids)
    expected = whole(hidden)[..., mx.array(sorted(ids))]
    assert mx.allclose(part(hidden), expected, atol=1e-4).item()
    wanted = np.array([[3, 90], [8, NONE]], dtype=np.int32)
    assert part.own(wanted).tolist() == [[0, 2], [NONE, NONE]]
    assert whole.own(wanted).tolist() == wanted.tolist()


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(steps=110, warmup=10 / 110, learning_rate=1.0)
    rates = [learning_rate(recipe, step) for step in range(110)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.5)
    assert 0 < rates[109] < 0.001
    assert learning_rate(Recipe(steps=1, warmup=0, learning_rate=0.5), 0) == 0.5
