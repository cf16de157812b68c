"""One bench: every prompt answered in every way, in turn, so that what else the machine does slows
all ways alike. Read the ratios, not the times.
"""

import logging
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ..drafters import Drafter
from ..drafters.compose import Compose
from ..drafters.lookup import Lookup
from ..drafters.small import Small
from ..errors import EngineError, PromptTooLongError
from ..options import Options
from ..parts import Parts
from ..parts import load as load_parts
from ..prefix import Prefixes
from ..quote import Quote, Sentence
from ..targets import Target
from ..training.export import without_table
from . import peers
from .answer import Answer
from .prompts import Prompt
from .report import COMPOSED, COPIES, PLAIN, QUOTED, REPEATED, WRONG, Row, report
from .ways import Way, Wrong, mlx_lm, ours

_LOG = logging.getLogger(__name__)
_ENDS = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])")
_PREFIX = 1000
_WARM = (40, 4)  # tokens read and written in each way before it is timed
_TAIL = 4  # of a prompt, remembered with its answer as the engine does


@dataclass(frozen=True)
class Plan:
    """What to compare: the ``prompts``, each answered by at most ``tokens`` tokens in the engine's
    own ways, or only in those that are ``short`` of time; in those of the engines installed in
    ``peers``, a folder; ``repeated`` of the passage prompts asked a second time, and ``quoted`` of
    them answered by quotes; and ``prefixes`` times the first token behind a prompt of 1,000 tokens,
    cold and kept. ``heldout``: the draft was not trained on the documents of the passage prompts.
    """

    prompts: Sequence[Prompt]
    tokens: int = 64
    short: bool = False
    peers: Path | None = None
    repeated: int = 10
    quoted: int = 10
    prefixes: int = 3
    heldout: bool = True


def run(options: Options, plan: Plan, tell: Callable[[str], None]) -> dict[str, Any]:
    """Compare, telling each step, and report: see :func:`dflash_engine.bench.report.report`.

    ``options`` are an engine's; whatever its ``drafter``, all are compared, and nothing of what the
    engine keeps is read or changed. A peer that fails is reported with its error. Raises as loading
    an engine does, and PromptTooLongError.
    """
    tell("loading the models, and measuring forwards")
    parts = load_parts(replace(options, drafter="composed", store=None, prefix_bytes=0))
    with ExitStack() as stack:
        stack.callback(parts.close)
        bench = _Bench(options, plan, parts, stack, tell)
        rows = bench.compare()
        rows += bench.repeat()
        rows += bench.quote()
        prefix = bench.prefixes() if plan.prefixes else None
    return report(
        options, plan.tokens, parts, rows, bench.failed, prefix, bench.versions, plan.heldout
    )


class _Bench:
    def __init__(
        self,
        options: Options,
        plan: Plan,
        parts: Parts,
        stack: ExitStack,
        tell: Callable[[str], None],
    ) -> None:
        self.plan, self.parts, self.tell = plan, parts, tell
        self.failed: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        assert isinstance(parts.drafter, Compose)
        self._composed = parts.drafter
        self._require_room()
        self.ways = self._own() | self._peers(options, stack)
        warm = (range(3, 3 + _WARM[0]), _WARM[1])
        for name, way in list(self.ways.items()):
            self._answer(name, way, *warm)

    def _require_room(self) -> None:
        asked = [m for p in self.plan.prompts for m in (p.messages, p.earlier) if m]
        longest = max(len(self._tokens(messages)) for messages in asked) + self.plan.tokens
        if longest > (context := self.parts.target.context):
            raise PromptTooLongError(
                f"the longest prompt and its answer take {longest} tokens, and the target reads at "
                f"most {context}: ask for shorter answers, or leave out that kind of prompts"
            )

    def _own(self) -> dict[str, Way]:
        target, composed = self.parts.target, self._composed
        model = composed.model
        drafters: dict[str, Drafter | None] = {"none": None, "lookup": Lookup()}
        if model:
            drafters[model.name] = model
            without = replace(composed.costs, drafts=())
            drafters[COPIES] = Compose(composed.guessers, None, without, name=COPIES)
        drafters[COMPOSED] = composed
        drafters[WRONG] = Compose([], Wrong(target.vocab_size), replace(composed.costs, drafts=()))
        if self.plan.short:
            for name in ("none", COPIES):
                drafters.pop(name, None)
        ways: dict[str, Way] = {PLAIN: partial(mlx_lm, target)}
        if isinstance(model, Small):
            ways["mlx-lm small"] = partial(mlx_lm, target, draft=model.model.model)
        return ways | {name: partial(ours, target, drafter) for name, drafter in drafters.items()}

    def _peers(self, options: Options, stack: ExitStack) -> dict[str, Way]:
        folder = self.plan.peers
        if folder is None:
            return {}
        exported = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers.export(self.parts.target, options.target, exported / "target")
        draft = None if isinstance(self._composed.model, Small) else options.draft
        draft = draft and without_table(draft, exported / "draft")
        found: dict[str, Way] = {}
        for name in peers.installed(folder):
            for mode in peers.offered(name, draft is not None):
                self.tell(f"starting {name} {mode}")
                python = peers.interpreter(folder, name)
                stop = self.parts.target.stop_tokens
                try:
                    peer = peers.start(name, mode, python, exported / "target", draft, stop=stop)
                except peers.PeerError as error:
                    self.failed[f"{name} {mode}"] = str(error)
                    continue
                stack.callback(peer.close)
                self.versions[name] = peer.version
                found[peer.name] = peer.answer
        return found

    def _answer(self, name: str, way: Way, prompt: Sequence[int], most: int) -> Answer | None:
        # None, and never again, where it failed.
        try:
            return way(prompt, most)
        except EngineError as error:
            _LOG.warning("%s: %s", name, error)
            self.failed[name] = str(error)
            self.ways.pop(name, None)
            return None

    def compare(self) -> list[Row]:
        rows = []
        for number, prompt in enumerate(self.plan.prompts):
            self.tell(f"{prompt.kind}: {prompt.name} ({number + 1} of {len(self.plan.prompts)})")
            if prompt.earlier:
                earlier = self._tokens(prompt.earlier)
                answer = ours(self.parts.target, self._composed, earlier, self.plan.tokens)
                self._remember(earlier, answer)
            ways = {
                name: way
                for name, way in self.ways.items()
                if not (name == WRONG and prompt.kind != "passages")
                and not (self.plan.short and prompt.earlier and name not in (PLAIN, COMPOSED))
            }
            rows.append(
                self._row(prompt.kind, prompt.name, self._tokens(prompt.messages), ways, number)
            )
        return rows

    def _row(self, kind: str, name: str, tokens: list[int], ways: dict[str, Way], turn: int) -> Row:
        names = list(ways)
        names = names[turn % len(names) :] + names[: turn % len(names)]  # each goes first in turn
        answers = {way: self._answer(way, ways[way], tokens, self.plan.tokens) for way in names}
        return Row(kind, name, len(tokens), {way: a for way, a in answers.items() if a})

    def _remember(self, prompt: list[int], answer: Answer) -> None:
        # As one given to another customer.
        assert self.parts.memory is not None
        self.parts.memory.add([*prompt[-_TAIL:], *answer.tokens], owners=set())

    def repeat(self) -> list[Row]:
        """The same questions, asked a second time."""
        asked = [prompt for prompt in self.plan.prompts if prompt.kind == "passages"]
        ways = {PLAIN: self.ways[PLAIN], COMPOSED: self.ways[COMPOSED]}
        rows = []
        for number, prompt in enumerate(asked[: self.plan.repeated]):
            self.tell(f"asked a second time: {prompt.name}")
            tokens = self._tokens(prompt.messages)
            self._remember(tokens, ours(self.parts.target, Lookup(), tokens, self.plan.tokens))
            rows.append(self._row(REPEATED, prompt.name, tokens, ways, number))
        return rows

    def quote(self) -> list[Row]:
        """The same questions, answered by whole sentences of their passages."""
        rows = []
        asked = [prompt for prompt in self.plan.prompts if prompt.kind == "passages"]
        for number, prompt in enumerate(asked[: self.plan.quoted]):
            self.tell(f"quoted: {prompt.name}")
            constraint = partial(_quote, self.parts.target, prompt.passages)
            ways: dict[str, Way] = {
                PLAIN: partial(_quoting, partial(mlx_lm, self.parts.target), constraint),
                COMPOSED: partial(
                    _quoting, partial(ours, self.parts.target, self._composed), constraint
                ),
            }
            rows.append(self._row(QUOTED, prompt.name, self._tokens(prompt.messages), ways, number))
        return rows

    def prefixes(self) -> dict[str, float]:
        """Median seconds to the first token behind a prompt of ``_PREFIX`` tokens: read cold, and
        with all but the question known from memory, and from disk.
        """
        read = [token for p in self.plan.prompts for token in self._tokens(p.messages)]
        read = (read * (1 + _PREFIX // len(read)))[:_PREFIX]
        seconds: dict[str, list[float]] = {"cold": [], "memory": [], "disk": []}
        for turn in range(self.plan.prefixes):
            self.tell(f"first token behind a kept prefix ({turn + 1} of {self.plan.prefixes})")
            with tempfile.TemporaryDirectory() as folder:

                def asked(
                    kept: Prefixes, turn: int = turn, question: Sequence[int] = range(20, 36)
                ) -> float:
                    prompt = [*read[turn:], *read[:turn], *question]
                    way = partial(ours, self.parts.target, self._composed, prefixes=kept)
                    return way(prompt, 1).first

                def opened(folder: str = folder) -> Prefixes:
                    room = 1 << 30
                    return Prefixes("", memory_bytes=room, folder=Path(folder), disk_bytes=room)

                with closing(opened()) as kept:
                    seconds["cold"].append(asked(kept))
                    seconds["memory"].append(asked(kept, question=range(40, 56)))
                with closing(opened()) as kept:
                    seconds["disk"].append(asked(kept, question=range(60, 76)))
        return {name: median(taken) for name, taken in seconds.items()}

    def _tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        tokenizer = self.parts.target.tokenizer
        return [int(t) for t in tokenizer.apply_chat_template(messages, add_generation_prompt=True)]


def _quote(target: Target, passages: Sequence[str]) -> Quote:
    return Quote(
        [
            Sentence(text, f"passage {number}")
            for number, passage in enumerate(passages, 1)
            for text in _ENDS.split(passage)
        ],
        partial(target.tokenizer.encode, add_special_tokens=False),
        target.tokenizer.decode,
        target.stop_tokens,
    )


def _quoting(
    way: Callable[..., Answer], constraint: Callable[[], Quote], prompt: Sequence[int], most: int
) -> Answer:
    # With a new constraint for each answer, made before the clock starts.
    return way(prompt, most, constraint=constraint())
