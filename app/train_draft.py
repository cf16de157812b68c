"""``dflash-rag train-draft``: a DFlash draft for the target and the documents of this installation.

What was done is kept in a folder: prompts, the target's answers, hidden states, the state of
training. A run that was interrupted goes on there when the command is given again.
"""

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from dflash_engine import hub
from dflash_engine.bench.prompts import Kind, Prompt
from dflash_engine.bench.report import COMPOSED, COPIES, PLAIN
from dflash_engine.bench.run import Plan as BenchPlan
from dflash_engine.bench.run import run as compare
from dflash_engine.chat import ChatTemplate
from dflash_engine.drafters import block_checkpoint
from dflash_engine.options import Options
from dflash_engine.targets import Target
from dflash_engine.targets import load as load_target
from dflash_engine.training import (
    HeldOut,
    Limits,
    Outcome,
    Progress,
    Recipe,
    SequenceFile,
    design,
    design_of,
    export,
    train,
)
from dflash_engine.training import Sequence as Row
from dflash_engine.training.check import check_draft
from dflash_engine.training.estimate import Speed, measure
from dflash_engine.training.generate import ROWS, Made, make_sequences, prompt_id
from dflash_engine.training.plot import log, plot
from ingest import Home, Passage

from . import training
from .errors import AppError
from .ingesting import Bar
from .rag.questions import Question, from_target, from_templates
from .service import open_embedder, open_index
from .settings import Settings
from .training import TrainingPrompt

SHARE_OF_FILES = 0.1  # held out
HELD_OUT = 48  # prompts to measure with
LEAST_PROMPTS = 8  # to train on
ANSWERING = 0.4  # of the time, the target writes what the draft learns from
MOST_HELD_OUT = 64  # tokens of an answer held out
SECONDS_A_PROMPT = 2.0  # of the whole time: more prompts than that are not made
EACH = 2  # questions of a passage, of the target's own and from templates
ASKING = 0.04  # of the time, the target writes questions
WINDOW = 256  # tokens of a row of plain text
TEXT = 2  # tokens of plain text for each of an answer, at most
BLOCK_SIZE = 8  # tokens of a new draft's block
VOCABULARY = 8192  # the most frequent tokens, which the draft can draft
EVALUATIONS = 12
BENCH_TOKENS = 64  # of an answer, when comparing
BENCHED = 10  # prompts on documents held out, and as many on the others, to compare with


@dataclass(frozen=True)
class Pass:
    """What the target answers, until the share ``until`` of the time for answers is spent: prompts
    with ``passages``, or the questions alone, by at most ``tokens``.
    """

    passages: bool
    temperature: float
    until: float
    tokens: int


# Answers to questions alone come much sooner, and teach how the target writes; those to passages,
# which are read for minutes, how it uses them.
PASSES = (
    Pass(passages=True, temperature=0.0, until=0.5, tokens=160),
    Pass(passages=False, temperature=0.0, until=0.6, tokens=256),
    Pass(passages=False, temperature=1.0, until=0.7, tokens=256),
    Pass(passages=True, temperature=1.0, until=1.0, tokens=160),
)


@dataclass(frozen=True)
class Run:
    """Where a run keeps what it made, and what it was begun with."""

    folder: Path

    @property
    def prompts(self) -> Path:
        """The prompts, a JSON list."""
        return self.folder / "prompts.json"

    @property
    def plan(self) -> Path:
        """What was begun, and how far: see :class:`Begun`."""
        return self.folder / "plan.json"


@dataclass(frozen=True)
class Begun:
    """What a run was begun with; ``answering``: seconds in which answers were written so far;
    ``steps``: of training, None until answers are there.
    """

    target: str
    documents: list[str]
    hours: float
    block_size: int | None
    start: str | None
    answering: float = 0.0
    steps: int | None = None


def run(
    settings: Settings,
    *,
    documents: Sequence[Path],
    hours: float,
    start: str | None,
    block_size: int | None,
    folder: Path | None,
    to: Path | None,
    as_json: bool,
) -> int:
    """Train, export and compare; print what came of it, and return the exit status.

    ``start`` names a draft to begin as; its block size is kept where ``block_size`` is None.
    """
    options = Options.of(
        settings.target_model,
        drafter="none",
        models=settings.models_folder,
        precision=settings.precision,
        context=settings.context,
    )
    name = f"{options.target_name}-dflash"
    to = (to or settings.home / "drafts" / name).absolute()
    if to.exists():
        raise AppError(f"{to} is there already: choose another --to, or remove it")
    missing = [str(path) for path in documents if not path.exists()]
    if missing:
        raise AppError(f"{', '.join(missing)}: no such file or folder")
    folder = (folder or settings.home / "training" / name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            whole = [str(path.resolve()) for path in documents]
            begin = Begun(hub.digest(options.target), whole, hours, block_size, start)
            result = _Training(settings, options, Run(folder), to, begin).run()
    except Timeout:
        raise AppError(f"another process trains in {folder}: wait for it") from None
    if as_json:
        json.dump(result, sys.stdout, indent=1, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        _print(result, Console(highlight=False))
    return 0


class _Training:
    def __init__(
        self,
        settings: Settings,
        options: Options,
        kept: Run,
        to: Path,
        begin: Begun,
    ) -> None:
        self.settings, self.options, self.kept, self.to = settings, options, kept, to
        self.told = Console(stderr=True, highlight=False)
        self.key = begin.target
        self.start = hub.resolve(begin.start, settings.models_folder) if begin.start else None
        self.begun = self._begin(begin)

    def _begin(self, new: Begun) -> Begun:
        try:
            kept = Begun(**json.loads(self.kept.plan.read_text(encoding="utf-8")))
        except FileNotFoundError:
            self._save(new)
            return new
        except (ValueError, TypeError) as error:
            raise AppError(f"{self.kept.plan} is damaged ({error}): remove its folder") from None
        for what in ("target", "documents", "hours", "block_size", "start"):
            if getattr(kept, what) != getattr(new, what):
                raise AppError(
                    f"{self.kept.folder} holds a run with other {what} "
                    f"({getattr(kept, what)}): go on with those, or choose another --run"
                )
        self.told.print(f"going on with the run in {self.kept.folder}", markup=False)
        return kept

    def _save(self, begun: Begun) -> None:
        self.begun = begun
        _write(self.kept.plan, asdict(begun))

    def run(self) -> dict[str, Any]:
        options = self.options
        target = load_target(
            options.target, options.target_name, options.precision, None, options.context
        )
        template = {"enable_thinking": self.settings.thinking}
        chat = ChatTemplate(target.tokenizer, options.target_name, template)
        draft = self._design(target)
        check_draft(block_checkpoint.parse(draft, "to be trained"), target)
        # In threads that end: idle ones of the embedding model slow down the target.
        with ThreadPoolExecutor(1) as other:
            passages = other.submit(self._read).result()
        held_out = training.hold_out([p.file for p in passages], SHARE_OF_FILES)
        if self.kept.prompts.exists():
            kept = json.loads(self.kept.prompts.read_text(encoding="utf-8"))
            prompts = [TrainingPrompt(**each) for each in kept]
        else:
            written = self._written(target, chat, passages)
            with ThreadPoolExecutor(1) as other:
                prompts = other.submit(self._prompts, chat, passages, held_out, written).result()
        apart = [prompt for prompt in prompts if prompt.held_out]
        others = [prompt for prompt in prompts if not prompt.held_out]
        known = others[: min(BENCHED, len(others) // LEAST_PROMPTS)]
        new = {prompt.question for prompt in known}
        others = [prompt for prompt in others if prompt.question not in new]
        measuring = self._held_out(target, apart)
        plain = list(_plain(target, _texts(passages, held_out)))
        recipe = Recipe(
            batch=4,
            anchors=48,
            learning_rate=1e-3,
            vocabulary=_vocabulary(target, [*measuring, *plain]),
        )
        speed = None
        if self.begun.steps is None:
            sample = [*measuring[:6], *plain[:2]]
            with self.told.status("timing a few steps"):
                speed = measure(target, draft, sample, measuring[:4], recipe)
            self._tell(speed, measuring, others)
        answers = self._answers(target, chat, others)
        rows = _mixed(answers, plain)
        recipe = replace(recipe, vocabulary=_vocabulary(target, [*answers, *plain]))
        outcome, recipe = self._train(target, draft, rows, measuring, recipe, speed)
        folder = self.kept.folder
        made = folder / "draft"
        shutil.rmtree(made, ignore_errors=True)
        export(folder, made, vocabulary=recipe.vocabulary)
        picture = _picture(folder)
        kinds: list[tuple[Kind, Sequence[TrainingPrompt]]]
        kinds = [("passages", apart[:BENCHED]), ("known", known)]
        bench = self._bench(made, kinds, heldout=bool(held_out))
        copy = self.to.with_name(f".{self.to.name}.new")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(made, copy)
        copy.replace(self.to)
        return {
            "draft": str(self.to),
            "run": str(folder),
            "target": options.target_name,
            "target_digest": self.key,
            "start": self.begun.start,
            "hours": self.begun.hours,
            "prompts": len(others),
            "answers": len(answers),
            "answer_tokens": sum(map(_answer_tokens, answers)),
            "text_tokens": sum(len(row.tokens) for row in rows[len(answers) :]),
            "held_out_answers": len(measuring),
            "held_out_documents": sorted({prompt.file for prompt in apart}),
            "answering_seconds": round(self.begun.answering, 1),
            "training": asdict(outcome),
            "recipe": asdict(recipe) | {"vocabulary": len(recipe.vocabulary or ())},
            "curve": [row for row in log(folder) if row["held_out"]],
            "plot": picture,
            "bench": bench,
        }

    def _design(self, target: Target) -> dict[str, Any]:
        size = self.begun.block_size
        if self.start:
            return design_of(self.start, block_size=size)
        return design(self.options.target, target, block_size=size or BLOCK_SIZE)

    def _read(self) -> list[Passage]:
        home = Home(self.kept.folder / "documents")
        with home.lock():
            embedder = open_embedder(self.settings)
            with open_index(self.settings, home, embedder) as index:
                with Bar(self.told) as bar:
                    index.ingest(self.begun.documents, bar.show)
                return index.every_passage()

    def _written(
        self, target: Target, chat: ChatTemplate, passages: Sequence[Passage]
    ) -> dict[str, list[Question]]:
        # The target's own questions by the passage's id, as many as it writes in their time.
        found: dict[str, list[Question]] = {}
        until = time.monotonic() + self.begun.hours * 3600 * ASKING
        with self.told.status("the target writes questions") as status:
            shuffled = _shuffled(passages)
            for start in range(0, len(shuffled), ROWS):
                if time.monotonic() >= until:
                    break
                some = shuffled[start : start + ROWS]
                for question in from_target(some, target, chat, each=EACH):
                    found.setdefault(question.passage.id, []).append(question)
                status.update(f"the target writes questions: about {len(found)} passages")
        return found

    def _prompts(
        self,
        chat: ChatTemplate,
        passages: Sequence[Passage],
        apart: frozenset[str],
        written: Mapping[str, Sequence[Question]],
    ) -> list[TrainingPrompt]:
        home = Home(self.kept.folder / "documents")
        with home.lock():
            embedder = open_embedder(self.settings)
            with open_index(self.settings, home, embedder) as index:

                def prompts(wanted: Sequence[Passage]) -> list[TrainingPrompt]:
                    own = chain.from_iterable(written.get(p.id, ()) for p in wanted)
                    return training.prompts(
                        [*own, *from_templates(wanted, index, each=EACH)],
                        index,
                        embedder,
                        chat,
                        self.key,
                        held_out=apart,
                        top_k=self.settings.top_k,
                        detailed=True,
                    )

                held_out = [passage for passage in passages if passage.file in apart]
                others = [passage for passage in passages if passage.file not in apart]
                most = int(self.begun.hours * 3600 / SECONDS_A_PROMPT)
                with self.told.status("making prompts") as status:
                    made = [
                        *_enough(prompts, held_out, HELD_OUT, status.update),
                        *_enough(prompts, others, most, status.update),
                    ]
        if not apart:  # one document: other questions about it
            number = min(HELD_OUT, max(1, len(made) // 8))
            made = [replace(each, held_out=i < number) for i, each in enumerate(made)]
        if sum(not each.held_out for each in made) < LEAST_PROMPTS:
            raise AppError(
                f"only {len(made)} prompts can be made of {', '.join(self.begun.documents)}: "
                "give more documents"
            )
        _write(self.kept.prompts, [asdict(each) for each in made])
        return made

    def _held_out(self, target: Target, prompts: Sequence[TrainingPrompt]) -> list[Row]:
        file = SequenceFile(self.kept.folder / "held_out.jsonl", self.key)
        asked = [(prompt.id, prompt.tokens) for prompt in prompts]
        with self.told.status(f"answering {len(asked)} prompts to measure with"):
            make_sequences(target, asked, file, max_tokens=MOST_HELD_OUT)
        return sorted(file, key=lambda row: row.prompt_id)

    def _answers(
        self, target: Target, chat: ChatTemplate, prompts: Sequence[TrainingPrompt]
    ) -> list[Row]:
        file = SequenceFile(self.kept.folder / "answers.jsonl", self.key)
        questions = dict.fromkeys(prompt.question for prompt in prompts)
        alone = [chat([{"role": "user", "content": question}]) for question in questions]
        asked = {
            True: [(prompt.id, prompt.tokens) for prompt in prompts],
            False: [(prompt_id(self.key, tokens), tokens) for tokens in alone],
        }
        whole = self.begun.hours * 3600 * ANSWERING
        for each in PASSES:
            earlier = self.begun.answering
            if self.begun.steps is not None or earlier >= whole * each.until:
                continue
            mark = f"@{each.temperature:g}" if each.temperature else ""
            with self.told.status("") as status:

                def tell(made: Made, earlier: float = earlier) -> None:
                    self._save(replace(self.begun, answering=earlier + made.seconds))
                    rate = made.tokens / max(made.seconds, 1e-9)
                    status.update(
                        f"answers: {made.answered} of {made.tokens} tokens, {rate:.0f} a second; "
                        f"{(whole - earlier - made.seconds) / 60:.0f} minutes to go"
                    )

                make_sequences(
                    target,
                    [(id + mark, tokens) for id, tokens in asked[each.passages]],
                    file,
                    max_tokens=each.tokens,
                    temperature=each.temperature,
                    most_seconds=whole * each.until - earlier,
                    on_progress=tell,
                )
        return sorted(file, key=lambda row: row.prompt_id)

    def _tell(self, speed: Speed, held_out: Sequence[Row], prompts: Sequence[object]) -> None:
        hours = self.begun.hours
        self.told.print(
            f"{len(prompts)} prompts, {len(held_out)} answers held out. Of {hours:g} hours, "
            f"{hours * ANSWERING:.1f} are for answers; a training step takes {speed.step:.2f} s "
            f"and {speed.bytes / 1e9:.1f} GB beside the target, so there will be about "
            f"{hours * 3600 * (1 - ANSWERING) / speed.step:.0f} at most"
        )

    def _train(
        self,
        target: Target,
        draft: dict[str, Any],
        rows: Sequence[Row],
        held_out: Sequence[Row],
        recipe: Recipe,
        speed: Speed | None,  # where the number of steps is not known yet
    ) -> tuple[Outcome, Recipe]:
        if speed is not None:
            left = self.begun.hours * 3600 - self.begun.answering
            tokens = sum(len(row.tokens) for row in [*rows, *held_out])
            steps = speed.steps(left, tokens, len(held_out), EVALUATIONS)
            self._save(replace(self.begun, steps=steps))
        steps = self.begun.steps or 1
        recipe = replace(recipe, steps=steps)
        every = max(1, steps // EVALUATIONS)
        limits = Limits(evaluate_every=every, save_every=min(every, 100), patience=6)
        measured: HeldOut | None = None
        with self.told.status("training") as status:

            def tell(progress: Progress) -> None:
                nonlocal measured
                measured = progress.held_out or measured
                line = f"step {progress.step} of {steps}: loss {progress.loss:.3f}"
                if measured:
                    kept = " ".join(f"{share:.2f}" for share in measured.by_position)
                    line += f", {measured.tokens_per_round:.3f} tokens a round held out ({kept})"
                if progress.held_out and not self.told.is_terminal:
                    self.told.print(f"{line}, {progress.seconds:.0f} s")
                left = progress.seconds / progress.step * (steps - progress.step)
                status.update(f"{line}; {left / 60:.0f} minutes to go")

            outcome = train(
                target,
                self.key,
                draft,
                rows,
                held_out,
                self.kept.folder,
                start=self.start,
                recipe=recipe,
                limits=limits,
                on_progress=tell,
            )
        return outcome, recipe

    def _bench(
        self, draft: Path, kinds: Sequence[tuple[Kind, Sequence[TrainingPrompt]]], heldout: bool
    ) -> dict[str, Any]:
        asked = [
            Prompt(kind, each.question, each.messages, None, (each.question,), tuple(each.passages))
            for kind, prompts in kinds
            for each in prompts
        ]
        options = Options.of(
            self.settings.target_model,
            str(draft),
            models=self.settings.models_folder,
            precision=self.settings.precision,
            context=self.settings.context,
        )
        plan = BenchPlan(asked, BENCH_TOKENS, repeated=0, quoted=0, prefixes=0, heldout=heldout)
        with self.told.status("") as status:
            return compare(options, plan, status.update)


def _write(path: Path, content: object) -> None:
    # Whole or not at all, whenever the process is killed.
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    new.replace(path)


def _texts(passages: Sequence[Passage], apart: frozenset[str]) -> list[str]:
    by_file: dict[str, list[str]] = {}
    for passage in passages:
        if passage.file not in apart:
            by_file.setdefault(passage.file, []).append(passage.text)
    return ["\n\n".join(texts) for texts in by_file.values()]


def _enough(
    make: Callable[[Sequence[Passage]], list[TrainingPrompt]],
    passages: Sequence[Passage],
    most: int,
    tell: Callable[[str], None],
) -> list[TrainingPrompt]:
    # Of some passages at a time, in an order of chance that is the same each time.
    shuffled = _shuffled(passages)
    found: dict[str, TrainingPrompt] = {}
    for start in range(0, len(shuffled), 16):
        if len(found) >= most:
            break
        found |= {prompt.id: prompt for prompt in make(shuffled[start : start + 16])}
        tell(f"making prompts: {len(found)} of at most {most}")
    return list(found.values())[:most]


def _shuffled(passages: Sequence[Passage]) -> list[Passage]:
    return Random(0).sample(passages, len(passages))


def _plain(target: Target, texts: Sequence[str]) -> Iterator[Row]:
    for text in texts:
        encoded = target.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        tokens = [int(token) for token in encoded]
        for start in range(0, len(tokens) - WINDOW // 4, WINDOW):
            yield Row(tokens[start : start + WINDOW], 1)


def _mixed(answers: Sequence[Row], plain: Sequence[Row]) -> list[Row]:
    room = TEXT * sum(map(_answer_tokens, answers))
    kept: list[Row] = []
    for row in Random(0).sample(plain, len(plain)):
        if room < len(row.tokens):
            break
        room -= len(row.tokens)
        kept.append(row)
    return [*answers, *kept]


def _answer_tokens(row: Row) -> int:
    return len(row.tokens) - row.answer


def _vocabulary(target: Target, rows: Sequence[Row]) -> tuple[int, ...]:
    counts = Counter(token for row in rows for token in row.tokens[row.answer :])
    counts.update(target.stop_tokens)
    return tuple(sorted(token for token, _ in counts.most_common(VOCABULARY)))


def _picture(folder: Path) -> str | None:
    path = folder / "training.png"
    try:
        plot(folder, path)
    except ImportError:
        return None
    return str(path)


def _print(result: dict[str, Any], console: Console) -> None:
    training, kinds = result["training"], result["bench"]["kinds"]
    best = training["best"]
    console.print(
        f"{result['draft']}: {best['tokens_per_round']:.2f} tokens a round on answers held out, "
        f"{training['step']} steps in {training['seconds'] / 3600:.1f} hours",
        markup=False,
    )
    trained = "documents it was trained on"
    apart = "documents held out" if result["bench"]["heldout"] else trained
    documents = {"passages": apart, "known": trained}
    for kind, ways in kinds.items():
        console.print(f"new questions on {documents[kind]}:")
        for name, way in (("before", COPIES), ("with it", COMPOSED), ("draft alone", "block")):
            console.print(
                f"  {name}: {ways[way]['ratio']:.2f} of {PLAIN}'s speed, "
                f"{ways[way]['tokens_per_round']:.2f} tokens a round"
            )
    console.print(f'To use it: draft_model = "{result["draft"]}" in dflash-rag.toml', markup=False)
