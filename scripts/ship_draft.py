"""Put a draft that ``dflash-rag train-draft --json`` made into the package, with its card.

    python scripts/ship_draft.py result.json documents/sources.json dflash_engine/drafts/NAME

``result.json`` is what the command printed, ``sources.json`` what make_draft_documents.py wrote.
The card (README.md) tells what the draft was made of and how good it is; the figures behind it are
in training.json, with those of the runs before if it was trained on from the draft in that folder.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from dflash_engine import hub

KEPT = ("target", "target_digest", "start", "hours", "prompts", "answers", "answer_tokens",
        "text_tokens", "held_out_answers", "held_out_documents", "answering_seconds", "training",
        "recipe", "curve")  # fmt: skip
KINDS = {"passages": "documents held out", "known": "documents trained on"}
WAYS = ("none", "lookup", "copies", "block", "composed")


def table(head: list[str], rows: list[list[object]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def card(name: str, runs: list[dict[str, Any]], config: dict[str, Any]) -> str:
    """The README of the draft ``name``, from its ``runs``."""
    last = runs[-1]
    best, recipe = last["training"]["best"], last["recipe"]
    positions = range(1, len(best["by_position"]) + 1)
    known = hub.KNOWN[last["target"]]
    bench = [
        [KINDS[kind], way, f"{of['ratio']:.2f}", f"{of['tokens_per_round']:.2f}"]
        for kind, ways in last["bench"]["kinds"].items()
        for way, of in ways.items()
        if way in WAYS
    ]
    made = [
        [number, run["start"] or "the target's layers", f"{run['training']['seconds'] / 3600:.2f}",
         f"{run['answering_seconds'] / 3600:.2f}", run["training"]["step"], run["answers"],
         run["answer_tokens"], run["text_tokens"],
         f"{run['training']['best']['tokens_per_round']:.3f}"]
        for number, run in enumerate(runs, 1)
    ]  # fmt: skip
    curve, hours, steps = [], 0.0, 0
    for run in runs:
        for row in run["curve"]:
            curve.append([f"{hours + row['seconds'] / 3600:.2f}", steps + row["step"],
                          f"{row['held_out']['tokens_per_round']:.3f}"])  # fmt: skip
        hours, steps = hours + run["training"]["seconds"] / 3600, steps + run["training"]["step"]
    sources = [
        [s["package"], s["version"], s["pages"], f"{s['characters'] / 1e6:.2f}",
         ", ".join(s["licences"]) or "see its debian/copyright"]
        for s in last["sources"]
    ]  # fmt: skip
    layers, block = config["num_hidden_layers"], config["block_size"]
    taps, drafted = config["dflash_config"]["target_layer_ids"], f"{recipe['vocabulary']:,}"
    loss, digest = recipe["loss"], last["target_digest"]
    return f"""# {name}

A DFlash draft for {known.source.removeprefix("pypi:")} (SmolLM2-135M-Instruct), whose hash is
`{digest}` (`dflash_engine.hub.digest`). It proposes tokens, the target checks them: answers are
the target's own. {layers} layers, blocks of {block} tokens, taps {taps}; it drafts {drafted} tokens
of the vocabulary, by the target's head. Without the tensor `d2t` the same file drafts all of them,
and then the DFlash authors' package runs it too.

## How good it is

{best["tokens_per_round"]:.3f} tokens a round on {last["held_out_answers"]} answers about documents
that were held out whole. Shares of rounds in which so many drafted tokens were kept:

{table(["drafted", *map(str, positions)], [["kept", *best["by_position"]]])}

New questions, on two CPU cores ({last["bench"]["machine"]}), beside mlx-lm's plain generation;
`copies` is composed drafting without this draft:

{table(["questions on", "way", "speed", "tokens a round"], bench)}

## How it was made

{
        table(
            [
                "run",
                "begun as",
                "hours of training",
                "hours of answers",
                "steps",
                "answers",
                "answer tokens",
                "text tokens",
                "held-out tokens a round",
            ],
            made,
        )
    }

A step takes {recipe["batch"]} sequences and up to {recipe["anchors"]} blocks of each. AdamW,
learning rate {recipe["learning_rate"]:g} with warm-up and cosine, no weight decay, clipping at
{recipe["clip"]:g}; loss `{loss["kind"]}`, gamma {loss["gamma"]:g}, of which the share
{loss["soft"]:g} is with what the target held likely; seed {recipe["seed"]}.

Tokens a round on the held-out answers while it was trained (`training.png`):

{table(["hours", "steps", "tokens a round"], curve)}

## What it was trained on

The samples of this project, and documentation that Debian distributes under free licences, one
document in ten held out. Of each package only the pages of the manual were taken; its licences are
those in its file debian/copyright:

{table(["package", "version", "pages", "million characters", "licences"], sources)}

It began as layers of SmolLM2-135M-Instruct (Apache-2.0, Hugging Face).

## To make it again

```sh
python scripts/make_draft_documents.py documents/
dflash-rag train-draft --target {last["target"]} --documents documents/ \\
    --documents data/samples --hours {last["hours"]:g} --block-size {block} \\
    --to draft --run run --json > result.json
python scripts/ship_draft.py result.json documents/sources.json dflash_engine/drafts/{name}
```

Nothing in it is drawn without a seed, but how much is done in the time depends on the machine.
"""


def main() -> None:
    """Copy the draft, and write what is known of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("result", "sources", "folder"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    result = json.loads(given.result.read_text(encoding="utf-8"))
    figures = given.folder / "training.json"
    runs = []
    if result["start"] and hub.resolve(result["start"], Path()).resolve() == given.folder.resolve():
        runs = json.loads(figures.read_text(encoding="utf-8"))
    kept = {key: result[key] for key in KEPT}
    files = (Path(file) for file in kept["held_out_documents"])
    kept["held_out_documents"] = ["/".join(file.parts[-2:]) for file in files]
    kept["bench"] = {key: result["bench"][key] for key in ("machine", "blas", "versions", "kinds")}
    kept["sources"] = json.loads(given.sources.read_text(encoding="utf-8"))
    runs.append(kept)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(result["draft"]) / name, given.folder / name)
    if result["plot"]:
        shutil.copy(result["plot"], given.folder / "training.png")
    figures.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    config = json.loads((given.folder / "config.json").read_text(encoding="utf-8"))
    text = card(given.folder.name, runs, config)
    (given.folder / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
