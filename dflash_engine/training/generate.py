"""What the target answers to many prompts: the sequences that its draft learns from.

Many prompts are answered at once by mlx-lm's ``BatchGenerator``, since a forward of many rows costs
little more than one of a single row. Its tokens are those of answering one at a time, but for ties
that rounding decides.
"""

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from ..decode import decode
from ..errors import PromptTooLongError
from ..sampling import Sampler, Sampling
from ..targets import Target
from .sequences import SequenceFile

ROWS = 32  # answered at once, at most
BATCH_TOKENS = 24 * 1024
_PREFILL_ROWS = 8
_PREFILL_STEP = 512
_WINDOW = 64  # prompts sorted by length at a time, so that a run cut short has all lengths
# Of the spread of log probabilities, root mean square: what rounding may do. A wrong mask does 0.1
# to 1.
_ROUNDING = {mx.float32: 1e-3}
_ROUNDING_16 = 0.1
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Request:
    index: int
    prompt: list[int]
    most: int  # tokens of answer
    tokens: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        return len(self.prompt) + self.most


def answers(
    target: Target,
    prompts: Iterable[Sequence[int]],
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """The target's answers to ``prompts`` (tokens), as they finish: (index of the prompt, tokens).

    An answer has ``max_tokens``, or what the context window leaves, unless a stop token ends it,
    which is then its last. At temperature 0 the tokens are those of plain greedy decoding; above, a
    prompt's answer depends on ``seed`` and its own tokens alone, not on what else is answered.

    At most 32 prompts are under way, and their longest one times their number, answers included, is
    at most ``batch_tokens``: the memory for keys and values. ``prompts`` may be endless: 64 are
    read ahead. Once ``should_stop`` says so no other prompt is begun; those begun are finished.

    A target that cannot be batched (see :func:`cannot_batch`) answers one at a time. Raises
    ValueError for an empty prompt or options out of range, PromptTooLongError for a prompt that
    leaves no room. Use it on the target's thread.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    requests = _sorted(
        _request(target, index, prompt, max_tokens) for index, prompt in enumerate(prompts)
    )
    sampler = partial(_sampler, Sampling(temperature=temperature), seed)
    stop = should_stop or (lambda: False)
    if reason := cannot_batch(target):
        _LOG.warning("%s answers one prompt at a time: %s", target.name, reason)
        yield from _one_by_one(target, requests, sampler, stop)
    else:
        yield from _together(target, requests, sampler, stop, batch_tokens)


def cannot_batch(target: Target) -> str | None:
    """Why ``target`` cannot answer several prompts at once; None if it can.

    Three prompts of different lengths are answered together and one by one to find out.
    """
    if target.kv_bits:
        return f"mlx-lm keeps no keys and values in {target.kv_bits} bits for several prompts"
    tokens = [(17 + 7919 * i) % target.vocab_size for i in range(50)]
    requests = [_Request(i, p, 3) for i, p in enumerate((tokens[:24], tokens[24:33], tokens[33:]))]
    try:
        together = _log_probabilities(target, requests)
    except (ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
        return f"mlx-lm does not answer several prompts at once with it: {error}"
    for request, found in zip(requests, together, strict=True):
        cache = target.make_cache()
        target.forward(request.prompt[:-1], cache, undoable=False)
        read = [request.prompt[-1], *request.tokens[:-1]]
        single = [target.forward([token], cache, undoable=False)[0][0, -1] for token in read]
        logits = mx.stack(single).astype(mx.float32)
        expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        difference = mx.stack(found).astype(mx.float32) - expected
        share = float(mx.sqrt(mx.mean(difference * difference)) / mx.std(expected))
        if not share <= _ROUNDING.get(single[0].dtype, _ROUNDING_16):
            return f"several prompts at once change its logits by {share:.2g} of their spread"
    return None


def _request(target: Target, index: int, prompt: Sequence[int], max_tokens: int) -> _Request:
    tokens = [int(token) for token in prompt]
    if not tokens:
        raise ValueError(f"prompt {index} is empty")
    if (room := target.context - len(tokens)) < 1:
        raise PromptTooLongError(
            f"prompt {index} has {len(tokens)} tokens; {target.name} reads at most "
            f"{target.context}, answer included: leave it out"
        )
    return _Request(index, tokens, min(max_tokens, room))


def _sorted(requests: Iterable[_Request]) -> Iterator[_Request]:
    # Longest first and shortest first in turn, so that neighbours are alike between windows too.
    requests = iter(requests)
    for number in count():
        window = list(islice(requests, _WINDOW))
        if not window:
            return
        yield from sorted(window, key=lambda r: len(r.prompt), reverse=number % 2 == 0)


def _sampler(sampling: Sampling, seed: int, prompt: list[int]) -> Sampler:
    # With one seed for all, all answers would be of the same luck.
    own = zlib.crc32(np.array([seed, *prompt], np.int64).tobytes())
    return Sampler(sampling, own, prompt)


_Samplers = Callable[[list[int]], Sampler]


def _one_by_one(
    target: Target, requests: Iterator[_Request], sampler: _Samplers, stop: Callable[[], bool]
) -> Iterator[tuple[int, list[int]]]:
    for request in requests:
        if stop():
            return
        rounds = decode(
            target,
            None,
            request.prompt,
            max_tokens=request.most,
            sampler=sampler(request.prompt),
            prefill_step=_PREFILL_STEP,
        )
        yield request.index, [token for step in rounds for token in step.tokens]


def _together(
    target: Target,
    requests: Iterator[_Request],
    sampler: _Samplers,
    stop: Callable[[], bool],
    batch_tokens: int,
) -> Iterator[tuple[int, list[int]]]:
    generator = _generator(target, target.stop_tokens)
    under_way: dict[int, _Request] = {}
    waiting = next(requests, None)
    try:
        while True:
            while waiting and _fits(waiting, under_way, batch_tokens) and not stop():
                under_way[_insert(generator, waiting, sampler(waiting.prompt))] = waiting
                waiting = next(requests, None)
            if not under_way:
                return
            for response in generator.next_generated():
                request = under_way[response.uid]
                request.tokens.append(int(response.token))
                if response.finish_reason:
                    del under_way[response.uid]
                    yield request.index, request.tokens
    finally:
        generator.close()
        mx.synchronize(generator.stream)  # MLX aborts a process that ends with a forward queued


def _fits(request: _Request, under_way: dict[int, _Request], batch_tokens: int) -> bool:
    rows = len(under_way) + 1
    longest = max(request.room, *(other.room for other in under_way.values()), 0)
    return rows == 1 or (rows <= ROWS and rows * longest <= batch_tokens)


def _generator(target: Target, stop_tokens: Iterable[int]) -> Any:
    return BatchGenerator(
        target.model,
        stop_tokens=[[token] for token in stop_tokens],
        completion_batch_size=ROWS,
        prefill_batch_size=_PREFILL_ROWS,
        prefill_step_size=_PREFILL_STEP,
    )


def _insert(generator: Any, request: _Request, sampler: Sampler) -> int:
    def choose(log_probabilities: mx.array) -> mx.array:
        return mx.array([sampler.choose(log_probabilities[0])])

    # Greedy rows are left to mlx-lm, which chooses for all of them in one operation.
    samplers = None if sampler.plain else [choose]
    uids = generator.insert([request.prompt], max_tokens=[request.most], samplers=samplers)
    return int(uids[0])


def _log_probabilities(target: Target, requests: Sequence[_Request]) -> list[list[mx.array]]:
    # Of each answer's tokens, all of which are counted; the last prompt joins those under way.
    generator = _generator(target, ())
    rows: dict[int, tuple[_Request, list[mx.array]]] = {}

    def begin(request: _Request) -> None:
        rows[_insert(generator, request, Sampler(Sampling()))] = request, []

    try:
        for request in requests[:-1]:
            begin(request)
        while responses := generator.next_generated():
            for response in responses:
                request, seen = rows[response.uid]
                request.tokens.append(int(response.token))
                seen.append(response.logprobs)
            if len(rows) < len(requests):
                begin(requests[-1])
        return [seen for _, seen in rows.values()]
    finally:
        generator.close()
        mx.synchronize(generator.stream)


def prompt_id(target_key: str, tokens: Sequence[int]) -> str:
    """A name for the prompt ``tokens`` to the target of ``target_key``: 32 hex digits, the same on
    every machine and in every run.
    """
    text = json.dumps([target_key, [int(token) for token in tokens]])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Made:
    """What a run has added to a file: how many prompts it ``answered``, in how many ``tokens`` of
    answers and how many ``seconds``; ``known`` prompts were passed over as the file has them,
    ``too_long`` ones as they leave no room for an answer.
    """

    answered: int = 0
    tokens: int = 0
    known: int = 0
    too_long: int = 0
    seconds: float = 0.0


def make_sequences(
    target: Target,
    prompts: Iterable[tuple[str, Sequence[int]]],
    file: SequenceFile,
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    most_tokens: int | None = None,
    most_seconds: float | None = None,
    on_progress: Callable[[Made], None] | None = None,
) -> Made:
    """Append the target's answers to ``prompts``, (id, tokens) each, to ``file`` as they finish.

    Prompts that the file has are passed over: a run that was killed goes on where it was. No other
    prompt is begun after ``most_seconds``, or once the answers in the file have ``most_tokens``;
    those begun are finished, or short answers would be favoured. ``on_progress`` hears of each
    answer. Other options and errors as of :func:`answers`, and TrainingError if ``file`` is another
    target's.
    """
    started = time.monotonic()
    done: set[str] = set()
    stored = 0
    for sequence in file:
        done.add(sequence.prompt_id)
        stored += len(sequence.tokens) - sequence.answer
    made = Made()
    begun: dict[int, tuple[str, list[int]]] = {}

    def new() -> Iterator[list[int]]:
        nonlocal made
        numbers = count()
        for id, tokens in prompts:
            if id in done:
                made = replace(made, known=made.known + 1)
            elif len(tokens) >= target.context:
                made = replace(made, too_long=made.too_long + 1)
            else:
                done.add(id)
                prompt = [int(token) for token in tokens]
                begun[next(numbers)] = id, prompt
                yield prompt

    def should_stop() -> bool:
        late = most_seconds is not None and time.monotonic() - started >= most_seconds
        return late or (most_tokens is not None and stored + made.tokens >= most_tokens)

    for index, answer in answers(
        target,
        new(),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        batch_tokens=batch_tokens,
        should_stop=should_stop,
    ):
        id, prompt = begun.pop(index)
        file.append([*prompt, *answer], len(prompt), id)
        made = replace(
            made,
            answered=made.answered + 1,
            tokens=made.tokens + len(answer),
            seconds=time.monotonic() - started,
        )
        if on_progress:
            on_progress(made)
    return replace(made, seconds=time.monotonic() - started)
