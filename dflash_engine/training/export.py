"""A trained draft as a folder in z-lab's layout, which this engine and the authors' package run."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from ..errors import TrainingError
from .run import best_draft


def export(
    run: Path,
    folder: Path,
    dtype: mx.Dtype = mx.bfloat16,
    vocabulary: Sequence[int] | None = None,
) -> Path:
    """Write the best draft of the training run in folder ``run`` into ``folder``, a new one.

    Weights are bf16, as published drafts' are, or fp32. With a ``vocabulary`` it drafts only those
    of the target's tokens, sooner, by this engine alone. The folder is there whole or not at all.
    Raises TrainingError if there is no such draft, or ``folder`` is taken.
    """
    best = best_draft(run)
    if folder.exists():
        raise TrainingError(f"{folder} is there already: choose another name, or remove it")
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    names = {mx.bfloat16: "bfloat16", mx.float32: "float32"}
    config = best.config | {"dtype": names[dtype]}
    weights = {name: array.astype(dtype) for name, array in best.weights.items()}
    if vocabulary is not None:
        kept = np.unique(np.asarray(vocabulary, np.int64))
        weights["d2t"] = mx.array(kept - np.arange(len(kept)))
    mx.save_safetensors(str(new / "model.safetensors"), weights, metadata={"format": "pt"})
    (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    new.replace(folder)
    return folder


def without_table(draft: Path, folder: Path) -> Path:
    """The DFlash 1 draft in folder ``draft`` as other engines run it, which know no table of the
    tokens that it drafts: a copy in ``folder``, a new one, that drafts all by the target's head;
    ``draft`` itself if it has no table, or a head of its own that needs it.
    """
    file = draft / "model.safetensors"
    tensors = cast(dict[str, mx.array], mx.load(str(file))) if file.exists() else {}
    if "d2t" not in tensors or "lm_head.weight" in tensors:
        return draft
    del tensors["d2t"]
    folder.mkdir(parents=True)
    shutil.copy(draft / "config.json", folder)
    mx.save_safetensors(str(folder / file.name), tensors, metadata={"format": "pt"})
    return folder
