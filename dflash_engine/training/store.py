"""Arrays in files that are there whole or not at all, whenever a process is killed."""

import json
import os
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

_UNFINISHED = ".new.safetensors"


def clear(folder: Path) -> None:
    """Make ``folder``, and remove what a kill left unfinished in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob(f"*{_UNFINISHED}"):
        file.unlink()


def write(path: Path, arrays: dict[str, mx.array], about: Any = None) -> None:
    """Replace the safetensors file at ``path``; ``about`` is kept with the arrays, as JSON."""
    new = path.with_name(path.stem + _UNFINISHED)  # until it is on the disk
    mx.save_safetensors(str(new), arrays, metadata={"about": json.dumps(about)})
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)


def read(path: Path) -> tuple[dict[str, mx.array], Any]:
    """Arrays, and what was kept with them; ValueError if the file is missing or damaged."""
    try:
        arrays, metadata = cast(
            tuple[dict[str, mx.array], dict[str, str]], mx.load(str(path), return_metadata=True)
        )
        mx.eval(arrays)
        return arrays, json.loads(metadata["about"])
    except (KeyError, RuntimeError) as error:
        raise ValueError(str(error)) from error
