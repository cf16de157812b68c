"""How a token is chosen, written once more: plainly, one position at a time, and sharing no code
with what it judges.
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from dflash_engine.sampling import Sampling
from dflash_engine.targets import Target


def scores(
    logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    """The logits of the position after ``prompt`` and ``answer``, with bias and penalties."""
    changed = [float(logit) for logit in logits]
    for token, bias in sampling.logit_bias.items():
        changed[token] += bias
    for token in {*prompt, *answer} if sampling.repetition_penalty != 1 else ():
        if changed[token] > 0:
            changed[token] /= sampling.repetition_penalty
        else:
            changed[token] *= sampling.repetition_penalty
    for token in set(answer):
        changed[token] -= sampling.presence_penalty
        changed[token] -= sampling.frequency_penalty * list(answer).count(token)
    return changed


def probabilities(scores: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """What a token is drawn from, likeliest first: temperature, min_p, top_k, then top_p."""
    heat = [score / sampling.temperature for score in scores]
    ranked = sorted(range(len(heat)), key=lambda token: (-heat[token], token))
    weights = {token: math.exp(heat[token] - heat[ranked[0]]) for token in ranked}
    kept = [token for token in ranked if weights[token] >= sampling.min_p]
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    total = sum(weights[token] for token in kept)
    chosen: dict[int, float] = {}
    covered = 0.0
    for token in kept:
        if covered >= sampling.top_p:
            break
        chosen[token] = weights[token] / total
        covered += chosen[token]
    return {token: share / covered for token, share in chosen.items()}


class Reader:
    """A target read one token at a time, with mlx-lm's own cache."""

    def __init__(self, target: Target, prompt: Sequence[int], step: int) -> None:
        self._model = target.model
        self._cache = make_prompt_cache(target.model)
        if target.kv_bits:
            self._cache = [QuantizedKVCache(32, target.kv_bits) for _ in self._cache]
        for start in range(0, len(prompt) - 1, step):
            self._model(mx.array([prompt[start : min(start + step, len(prompt) - 1)]]), self._cache)
        self.logits = self.read(prompt[-1])

    def read(self, token: int) -> list[float]:
        """The logits after one more token."""
        logits = self._model(mx.array([[token]]), self._cache)[0, -1]
        self.logits = np.array(logits.astype(mx.float32)).tolist()
        return self.logits


def greedy(
    target: Target, sampling: Sampling, prompt: Sequence[int], most: int, step: int
) -> list[int]:
    """The first choices after ``prompt``, past any end."""
    reader, answer = Reader(target, prompt, step), []
    while len(answer) < most:
        own = scores(reader.logits, sampling, prompt, answer)
        answer.append(max(range(len(own)), key=own.__getitem__))
        reader.read(answer[-1])
    return answer


def ranks(
    target: Target,
    sampling: Sampling,
    prompt: Sequence[int],
    answer: Sequence[int],
    step: int,
    random: np.random.Generator,
) -> list[float]:
    """Where each token of a drawn ``answer`` lies in its distribution, between 0 and 1.

    Of a right answer these are uniform and independent of one another (the probability integral
    transform, made continuous by a draw within the token's share). Raises KeyError for a token that
    had no probability.
    """
    reader, places = Reader(target, prompt, step), []
    for i, token in enumerate(answer):
        shares = probabilities(scores(reader.logits, sampling, prompt, answer[:i]), sampling)
        before = 0.0
        for other, share in shares.items():
            if other == token:
                break
            before += share
        places.append(before + shares[token] * random.random())
        reader.read(token)
    return places
