"""Plain decoding and lookup beside mlx-lm's own generation, interleaved, on SmolLM2-135M.

    python tests/bench/bench_decode.py [folder with models]

All three use the same model object and the same BLAS, prompt after prompt in turn, so that a busy
machine slows all alike: read the ratios, not the times.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dflash_engine import hub  # before mlx, for its BLAS
from dflash_engine.decode import decode
from dflash_engine.drafters import Drafter
from dflash_engine.drafters.lookup import Lookup
from dflash_engine.engine import default_models
from dflash_engine.sampling import Sampler, Sampling
from dflash_engine.targets import Target, load

SAMPLES = Path(__file__).parent.parent.parent / "data" / "samples"
BUILT_IN = [
    "Returns. Goods may be sent back within 30 days of delivery, unused and in their packaging. "
    "Refunds are paid to the original card within 14 days. Shipping costs are not refunded.",
    "Opening hours. The shop is open Monday to Friday from 9:00 to 18:00 and on Saturday from "
    "10:00 to 14:00. It is closed on Sundays and public holidays.",
    "Cleaning. Unplug the machine and let it cool for 30 minutes. Wipe the housing with a damp "
    "cloth. Rinse the water tank daily, and descale every 200 cups with the powder supplied.",
    "Warranty. The device is covered for 24 months from the date of purchase. Damage caused by "
    "limescale, wear of seals, and opening the housing are not covered.",
    "Delivery. Orders placed before 12:00 leave the same day. Delivery takes two working days "
    "within the country and five abroad, and is free for orders above 60 euros.",
]
QUESTIONS = [
    "What does the text say? Answer with its own words.",
    "Give the most important rule in the text, and its conditions.",
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


def passages() -> list[str]:
    """Pages of the English sample PDFs, or the built-in texts."""
    try:
        import pypdfium2
    except ImportError:
        return BUILT_IN
    pages = []
    for path in sorted(SAMPLES.glob("*.pdf")):
        with pypdfium2.PdfDocument(path) as document:
            texts = [page.get_textpage().get_text_range() for page in document]
        if "zh" not in path.name:  # the model reads English
            pages += [" ".join(text.split())[:1600] for text in texts]
    return ([page for page in pages if len(page) > 300] + BUILT_IN)[:5]


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
    arguments.add_argument("--lookup", nargs=3, type=int, metavar=("LONGEST", "SHORTEST", "WIDTH"))
    given = arguments.parse_args()
    target = load(hub.resolve("smollm2-135m", given.models), "smollm2-135m")
    lookup = Lookup(*given.lookup) if given.lookup else Lookup()

    ways: dict[str, Callable[[list[int]], Run]] = {
        "mlx-lm": lambda prompt: theirs(target, prompt, given.tokens),
        "none": lambda prompt: ours(target, None, prompt, given.tokens),
        "lookup": lambda prompt: ours(target, lookup, prompt, given.tokens),
    }
    prompts = [prompt_of(target, text, question) for text in passages() for question in QUESTIONS]
    for way in ways.values():  # so that none pays for first use
        way(prompts[0][:40])

    print(f"lookup {lookup.longest}-{lookup.shortest}, width {lookup.width}; ratios to mlx-lm")
    print("                  ---- decoding ----  -- end to end --  tokens")
    print("prompt  answer    none      lookup    none    lookup    a round  same")
    rows: list[list[float]] = []
    for number, prompt in enumerate(prompts):
        names = list(ways)
        names = names[number % 3 :] + names[: number % 3]  # each goes first in turn
        runs = {name: ways[name](prompt) for name in names}
        base, plain, fast = runs["mlx-lm"], runs["none"], runs["lookup"]
        row = [
            base.decoding / plain.decoding,
            base.decoding / fast.decoding,
            base.total / plain.total,
            base.total / fast.total,
            (len(fast.tokens) - 1) / max(fast.rounds, 1),
        ]
        rows.append(row)
        same = base.tokens == plain.tokens == fast.tokens
        print(
            f"{len(prompt):6}  {len(base.tokens):6}    {row[0]:.2f}      {row[1]:.2f}      "
            f"{row[2]:.2f}    {row[3]:.2f}      {row[4]:.2f}     {'yes' if same else 'NO'}",
            flush=True,
        )
    middle = [median(column) for column in zip(*rows, strict=True)]
    print(
        f"median            {middle[0]:.2f}      {middle[1]:.2f}      {middle[2]:.2f}    "
        f"{middle[3]:.2f}      {middle[4]:.2f}"
    )


def prompt_of(target: Target, text: str, question: str) -> list[int]:
    content: Any = f"{text}\n\n{question}"
    return list(
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
    )


if __name__ == "__main__":
    main()
