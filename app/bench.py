"""``dflash-rag bench``: this machine's speed, beside mlx-lm and other engines."""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_engine.bench import peers, prompts
from dflash_engine.bench.prompts import Prompt
from dflash_engine.bench.report import COMPOSED, COPIES, PLAIN, WRONG, plot
from dflash_engine.bench.run import Plan
from dflash_engine.bench.run import run as compare
from dflash_engine.options import Options
from ingest import Home, Index, Passage

from .errors import AppError
from .rag import prompt, quote
from .service import open_embedder
from .settings import Settings

_QUICK = {"passages": 3, "again": 2}  # prompts
_QUICK_TOKENS = 40


def run(
    settings: Settings,
    *,
    quick: bool,
    kinds: Sequence[str],
    count: int,
    tokens: int,
    peers_folder: Path | None,
    wordings: Path | None,
    plot_to: Path | None,
    as_json: bool,
) -> int:
    """Compare and print; the exit status is 1 if an own mode's tokens were not mlx-lm's."""
    if quick and (kinds or wordings):
        raise AppError("--quick has prompts of its own: leave out --kind and --wordings")
    if plot_to:
        _require_plots(plot_to)
    if peers_folder and not peers.installed(peers_folder):
        raise AppError(
            f"none of {', '.join(peers.DRIVERS)} is installed in {peers_folder}: each needs a "
            "virtual environment of that name there (see docs/bench.md)"
        )
    try:
        if quick:
            asked = [p for kind, n in _QUICK.items() for p in prompts.load([kind], n)]
        else:
            asked = prompts.load(kinds or prompts.KINDS, count, wordings)
    except ValueError as error:
        raise AppError(str(error)) from None
    # In a thread that ends: the embedding model's threads, idle, would slow down the engine's.
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(_as_the_product_asks, settings, asked).result()
    plan = Plan(
        asked,
        tokens=_QUICK_TOKENS if quick else tokens,
        short=quick,
        peers=peers_folder,
        repeated=2 if quick else count,
        quoted=2 if quick else count,
        prefixes=0 if quick else min(3, count),
    )
    console = Console(highlight=False)
    told = Console(stderr=True, highlight=False)
    with told.status("") as status:
        result = compare(_options(settings), plan, lambda step: status.update(step))
    if as_json:
        json.dump(result, sys.stdout, indent=1, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        _print(result, console)
    if plot_to:
        plot(result, plot_to)
    own = {"none", "lookup", "block", "small", COPIES, COMPOSED, WRONG}
    wrong = [
        f"{way} ({kind})"
        for kind, ways in result["kinds"].items()
        for way, of in ways.items()
        if way in own and not of["identical"]
    ]
    for each in wrong:
        told.print(f"[red]not mlx-lm's tokens: {each}")
    return 1 if wrong else 0


def _as_the_product_asks(settings: Settings, asked: Sequence[Prompt]) -> list[Prompt]:
    # What it puts before the model: instructions, passages, the sentences nearest to the question.
    texts = dict.fromkeys(text for each in asked for text in each.passages)
    if not texts:
        return list(asked)
    embedder = open_embedder(settings)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        for number, text in enumerate(texts):
            (data / f"{number}.txt").write_text(text, encoding="utf-8")
        with (
            Home(Path(folder) / "home").lock() as home,
            Index.open(home, embedder, data) as index,
        ):
            index.ingest([data])  # tells which words are rare

            def compose(question: str, passages: Sequence[str]) -> list[dict[str, str]]:
                found = [
                    Passage(str(n), "", n, None, "", text, 0, len(text), 0)
                    for n, text in enumerate(passages)
                ]
                quoted = [q.sentence for q in quote.quotes(question, found, index, embedder)]
                return [
                    {"role": turn.role.value, "content": turn.content or ""}
                    for turn in prompt.messages(question, found, quoted)
                ]

            return [each.composed(compose) for each in asked]


def _require_plots(path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise AppError(
            "a plot needs matplotlib: pip install 'dflash-rag[bench]', or leave out --plot"
        ) from None
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise AppError(f"--plot {path}: name a file that ends in .png")
    if not os.access(path.parent, os.W_OK):
        raise AppError(f"--plot {path}: cannot write in {path.parent}")


def _options(settings: Settings) -> Options:
    return Options.of(
        settings.target_model,
        None if settings.draft_model == "none" else settings.draft_model,
        drafter="composed",
        models=settings.models_folder,
        precision=settings.precision,
        draft_bits=settings.draft_bits,
        kv_bits=settings.kv_bits,
        context=settings.context,
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _print(result: dict[str, Any], console: Console) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    console.print(
        f"{result['target']} ({result['precision']}), draft: {result['draft'] or 'none'}; at most "
        f"{result['most_tokens']} tokens an answer\n{result['machine']}, BLAS: {result['blas']}; "
        f"{versions}"
    )
    for kind, ways in result["kinds"].items():
        table = Table(title=f"{kind}, {ways[PLAIN]['prompts']} prompts", title_justify="left")
        table.add_column("")
        for name in (
            "tokens/s", "ratio", "median", "with prompt", "tokens/round", "rounds", "prompt/s",
            "peak MB", "same",
        ):  # fmt: skip
            table.add_column(name, justify="right")
        for way, of in ways.items():
            table.add_row(
                way,
                _number(of["tps"], 1),
                *(
                    _number(of[name], 2)
                    for name in ("ratio", "median_ratio", "total_ratio", "tokens_per_round")
                ),
                "" if of["rounds"] is None else str(of["rounds"]),
                f"{of['prefill_tps']:.0f}",
                f"{of['peak'] / 1e6:.0f}",
                "yes" if of["identical"] else "NO",
            )
        console.print(table)
        kept = ways.get(COMPOSED, {}).get("kept")
        if kept:
            told = ", ".join(f"{name} {count}" for name, count in kept.items())
            console.print(f"composed, tokens kept of {ways[COMPOSED]['tokens']}: {told}")
            widths = Counter(width for answer in result["widths"][kind] for width in answer)
            told = ", ".join(f"{width}: {count}" for width, count in sorted(widths.items()))
            console.print(f"rounds by the tokens they checked beside the anchor: {told}")
    if prefix := result["prefix"]:
        cold, memory, disk = (prefix[name] for name in ("cold", "memory", "disk"))
        console.print(
            f"first token behind 1,000 tokens: {cold:.2f} s cold; known from memory "
            f"{memory / cold:.2f} of that, from disk {disk / cold:.2f}"
        )
    for way, why in result["failed"].items():
        console.print(f"{way}: [red]failed[/red]: {escape(why)}")
