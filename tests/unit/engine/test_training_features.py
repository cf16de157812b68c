"""What the target says about a sequence, held beside one forward of all of it."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny

from dflash_engine.targets import load
from dflash_engine.training import Sequence, features
from dflash_engine.training.features import EXPECTED, Features


@pytest.mark.parametrize("answer", [1, 2, 8, 9, 19])
@pytest.mark.parametrize(("step", "group"), [(512, 64), (8, 64), (512, 8)])
def test_features_of_all_tokens_and_what_is_likely_in_the_answer(
    answer: int, step: int, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "STEP", step)
    monkeypatch.setattr(features, "GROUP", group)
    target = load(tiny.model("llama"), "llama")
    tokens = [(31 + 17 * i) % 256 for i in range(20)]
    target.tap(tiny.TAPS)
    logits, wanted = target.forward(tokens, target.make_cache(), undoable=False)
    assert wanted is not None

    seen = Features(target, "key", tiny.TAPS, tmp_path, 1 << 20).of(Sequence(tokens, answer))
    assert seen.features.dtype == mx.float16
    assert mx.allclose(seen.features, wanted, rtol=1e-2, atol=1e-3).item()
    places = slice(answer - 1, -1)  # where the answer's tokens are expected
    probabilities = np.asarray(mx.softmax(logits[0, places], axis=-1))
    likely = np.argsort(-probabilities, axis=-1)[:, :EXPECTED]
    found = np.asarray(seen.expected)
    assert found.shape == (20 - answer, EXPECTED)
    np.testing.assert_array_equal(np.sort(found), np.sort(likely))
    shares = np.take_along_axis(probabilities, found, 1)
    shares /= shares.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(seen.probabilities), shares, rtol=2e-3)

    kept = Features(target, "key", tiny.TAPS, tmp_path, 0).of(Sequence(tokens, answer))
    assert all(mx.array_equal(vars(kept)[name], vars(seen)[name]).item() for name in vars(seen))
