"""``dflash-rag models list``: which models there are, what they need, and what is here."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_engine import fit, hub, registry
from dflash_engine.fit import GIB, Machine

from .settings import Settings

CONTEXT = 8192  # tokens, for which memory is given


def show(settings: Settings, *, as_json: bool) -> None:
    """Print the models with short names, and the targets with the drafts made for them."""
    machine = Machine.here()
    found = {
        "machine": {"memory": machine.total, "for_models": machine.limit, "gpu": machine.gpu},
        "models": known(settings.models_folder),
        "pairs": pairs(settings.models_folder, machine),
    }
    if as_json:
        json.dump(found, sys.stdout, indent=2, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        _print(found, Console(highlight=False))


def known(models: Path) -> list[dict[str, Any]]:
    """The models with short names."""
    return [
        {
            "name": name,
            "source": model.source,
            "about": model.about,
            "pulled": hub.is_pulled(name, models),
        }
        for name, model in hub.KNOWN.items()
    ]


def pairs(models: Path, machine: Machine) -> list[dict[str, Any]]:
    """The registered pairs: memory in bytes with the target in 4 and in 8 bits, and what is here.

    ``target_here`` names each quantisation of the target in ``models``.
    """
    here = hub.pulled(models)
    recommended = fit.choose(machine)
    return [
        {
            "target": pair.target.repo,
            "draft": pair.draft.repo,
            "kind": pair.kind,
            "block_size": pair.block_size,
            "confirmed": pair.confirmed,
            "memory_4_bit": fit.of_pair(pair, 4, CONTEXT).total,
            "memory_8_bit": fit.of_pair(pair, 8, CONTEXT).total,
            "target_here": [name for name in here if registry.base_name(name) == pair.target.repo],
            "draft_here": f"hf:{pair.draft.repo}" in here,
            "recommended": pair == recommended,
        }
        for pair in registry.PAIRS
    ]


def _print(found: dict[str, Any], console: Console) -> None:
    table = _table("name", "here", "what it is")
    for model in found["models"]:
        table.add_row(
            model["name"], _yes(model["pulled"]), f"{model['about']}\n[dim]{model['source']}[/]"
        )
    console.print(table)
    console.print()
    table = _table(
        "target\n  and a draft for it", "kind,\nblock", "4 bit\nGiB", "8 bit\nGiB", "\nhere"
    )
    target = ""
    for pair in found["pairs"]:
        if pair["target"] != target:
            target = pair["target"]
            table.add_row(f"[bold]{target}[/]{_mark(pair)}")
            for name in pair["target_here"]:
                table.add_row(f"  {escape(name)}", "", "", "", _yes(True))
        table.add_row(
            f"  {pair['draft']}",
            f"{pair['kind']}, {pair['block_size'] or '?'}",
            f"{pair['memory_4_bit'] / GIB:5.1f}",
            f"{pair['memory_8_bit'] / GIB:5.1f}",
            _yes(pair["draft_here"]),
        )
    console.print(table)
    machine = found["machine"]
    here = f"This machine has {machine['for_models'] / GIB:.1f} for models"
    if not machine["gpu"]:
        here += "; without a GPU they would be slow, so none is recommended"
    console.print(
        f"\nGiB: the target in 4 or 8 bits, the draft, a context of {CONTEXT} tokens. {here}. "
        "Name a target by a quantisation of it, such as hf:mlx-community/Qwen3.5-4B-4bit; "
        "'dflash-rag models pull' then fetches its draft too."
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _mark(pair: dict[str, Any]) -> str:
    if pair["recommended"]:
        return "  [green]recommended here[/]"
    return "" if pair["confirmed"] else "  [dim]unconfirmed[/]"


def _yes(there: bool) -> str:
    return "[green]yes[/]" if there else ""
