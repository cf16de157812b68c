"""Plain decoding and lookup beside mlx-lm's own generation, interleaved, on SmolLM2-135M.

Ten customers' questions on the sample documents, in the product's own prompts.

    python tests/bench/bench_decode.py [folder with models]

All three use the same model object and the same BLAS, prompt after prompt in turn, so that a busy
machine slows all alike: read the ratios, not the times.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from app.rag import prompt, quote
from app.rag.retrieve import Threshold, retrieve
from app.service import open_embedder
from app.settings import Settings
from dflash_engine import hub  # before mlx, for its BLAS
from dflash_engine.decode import decode
from dflash_engine.drafters import Drafter
from dflash_engine.drafters.lookup import Lookup
from dflash_engine.engine import default_models
from dflash_engine.sampling import Sampler, Sampling
from dflash_engine.targets import Target, load
from ingest import Home, Index

SAMPLES = Path(__file__).parent.parent.parent / "data" / "samples"
QUESTIONS = [
    "How late can I come by on a Friday evening?",
    "What does it cost me to return something I have already opened?",
    "How often do I need to clean the burrs of my grinder?",
    "How much do you charge to send an order to Kinmen?",
    "Are you open on Sunday?",
    "What warranty do I get on the grinder?",
    "Can I return coffee beans?",
    "How do I clean the hopper?",
    "What should I do if the grinder does not start?",
    "How do I adjust the grind size?",
]


@dataclass
class Run:
    """One answer: its tokens, and seconds to the first and to the last."""

    tokens: list[int]
    first: float
    total: float
    rounds: int

    @property
    def decoding(self) -> float:
        return (self.total - self.first) / max(len(self.tokens) - 1, 1)


def prompts(target: Target, models: Path) -> list[list[int]]:
    """What the product puts before the model for each question: passages, quotes, question."""
    embedder = open_embedder(Settings(models=models))
    made = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Home(folder).lock() as home,
        Index.open(home, embedder, SAMPLES.parent) as index,
    ):
        index.ingest([SAMPLES])
        for question in QUESTIONS:
            threshold = Threshold(embedder.model.min_cosine)
            found = retrieve(question, index, embedder, top_k=3, threshold=threshold).passages
            passages = [scored.passage for scored in found]
            quoted = [q.sentence for q in quote.quotes(question, passages, index, embedder)]
            turns = [
                {"role": turn.role.value, "content": turn.content}
                for turn in prompt.messages(question, passages, quoted)
            ]
            made.append(target.tokenizer.apply_chat_template(turns, add_generation_prompt=True))
    return made


def theirs(target: Target, prompt: list[int], most: int) -> Run:
    from mlx_lm import stream_generate

    start = time.perf_counter()
    first = 0.0
    tokens = []
    for response in stream_generate(
        target.model, target.tokenizer, prompt, max_tokens=most, prefill_step_size=512
    ):
        first = first or time.perf_counter() - start
        tokens.append(response.token)
    return Run(tokens, first, time.perf_counter() - start, len(tokens) - 1)


def ours(target: Target, drafter: Drafter | None, prompt: list[int], most: int) -> Run:
    start = time.perf_counter()
    first, rounds = 0.0, 0
    tokens: list[int] = []
    for step in decode(target, drafter, prompt, max_tokens=most, sampler=Sampler(Sampling())):
        if step.tokens:
            first = first or time.perf_counter() - start
        tokens += step.tokens
        rounds += not step.prefill
    return Run(tokens, first, time.perf_counter() - start, rounds)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("models", nargs="?", type=Path, default=default_models())
    arguments.add_argument("--tokens", type=int, default=64)
    given = arguments.parse_args()
    target = load(hub.resolve("smollm2-135m", given.models), "smollm2-135m")
    lookup = Lookup()

    ways: dict[str, Callable[[list[int]], Run]] = {
        "mlx-lm": lambda prompt: theirs(target, prompt, given.tokens),
        "none": lambda prompt: ours(target, None, prompt, given.tokens),
        "lookup": lambda prompt: ours(target, lookup, prompt, given.tokens),
    }
    asked = prompts(target, given.models)
    for way in ways.values():  # so that none pays for first use
        way(asked[0][:40])

    print("ratios to mlx-lm, above 1 is faster")
    print("                  ---- decoding ----  -- end to end --  tokens")
    print("prompt  answer    none      lookup    none    lookup    a round  same")
    rows: list[list[float]] = []
    spent = {name: [0.0, 0.0] for name in ways}  # seconds decoding, seconds in all
    for number, tokens in enumerate(asked):
        names = list(ways)
        names = names[number % 3 :] + names[: number % 3]  # each goes first in turn
        runs = {name: ways[name](tokens) for name in names}
        base, plain, fast = runs["mlx-lm"], runs["none"], runs["lookup"]
        row = [
            base.decoding / plain.decoding,
            base.decoding / fast.decoding,
            base.total / plain.total,
            base.total / fast.total,
            (len(fast.tokens) - 1) / max(fast.rounds, 1),
        ]
        rows.append(row)
        for name, run in runs.items():
            spent[name][0] += run.total - run.first
            spent[name][1] += run.total
        same = base.tokens == plain.tokens == fast.tokens
        print(
            f"{len(tokens):6}  {len(base.tokens):6}    {row[0]:.2f}      {row[1]:.2f}      "
            f"{row[2]:.2f}    {row[3]:.2f}      {row[4]:.2f}     {'yes' if same else 'NO'}",
            flush=True,
        )
    middle = [median(column) for column in zip(*rows, strict=True)]
    print(
        f"median            {middle[0]:.2f}      {middle[1]:.2f}      {middle[2]:.2f}    "
        f"{middle[3]:.2f}      {middle[4]:.2f}"
    )
    theirs_all, plain_all, fast_all = spent["mlx-lm"], spent["none"], spent["lookup"]
    ratios = [theirs_all[k] / ours_all[k] for k in (0, 1) for ours_all in (plain_all, fast_all)]
    print("all ten together  {:.2f}      {:.2f}      {:.2f}    {:.2f}".format(*ratios))


if __name__ == "__main__":
    main()
