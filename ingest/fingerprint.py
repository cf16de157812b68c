"""What an index was made with: two indexes compare only if every part is the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ingest.embed import Embedder
from ingest.errors import UnusableModel
from ingest.passages import CUTTER_VERSION

_SLICE = 1 << 16
_SLICES = 64
_NAMES = {
    "model": "the embedding model",
    "weights": "its weights",
    "dimension": "the vectors' dimension",
    "query_prefix": "what is put before questions",
    "passage_prefix": "what is put before passages",
    "cutter": "the way files are cut into passages (version)",
}


@dataclass(frozen=True)
class Fingerprint:
    """The facts that vectors depend on; `weights` stands for the content of the model's folder."""

    model: str
    weights: str
    dimension: int
    query_prefix: str
    passage_prefix: str
    cutter: int

    @classmethod
    def of(cls, embedder: Embedder) -> Fingerprint:
        """The fingerprint of what this embedder would make; reads a few megabytes of its folder."""
        model = embedder.model
        return cls(
            model.name,
            weights_digest(embedder.folder),
            model.dimension,
            model.query_prefix,
            model.passage_prefix,
            CUTTER_VERSION,
        )

    @classmethod
    def from_json(cls, stored: str) -> Fingerprint:
        """The inverse of `to_json`."""
        return cls(**json.loads(stored))

    def to_json(self) -> str:
        """One line of JSON, the same for the same facts."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @property
    def digest(self) -> str:
        """A short name for it, to mark derived stores with."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def differences(self, other: Fingerprint) -> list[str]:
        """Each fact that differs, in words: the value here, then there; empty when none does."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{words} was {theirs[key]!r}, now is {mine[key]!r}"
            for key, words in _NAMES.items()
            if mine[key] != theirs[key]
        ]


def weights_digest(folder: Path) -> str:
    """A hash of a model's configuration and weights.

    Small files count whole; of a big one its size and 64 slices spread over it, which tells apart
    any two trained models without reading gigabytes at each start. Raises `UnusableModel` for a
    folder with neither.
    """
    digest = hashlib.sha256()
    counted = False
    kinds = (".json", ".safetensors", ".bin", ".model", ".txt")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix not in kinds or any(part.startswith(".") for part in name.parts):
            continue
        if not path.is_file() or path.name == "data_config.json":
            continue
        counted = True
        size = path.stat().st_size
        digest.update(f"{name.as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _SLICE * _SLICES:
                digest.update(file.read())
                continue
            for part in range(_SLICES):
                file.seek(part * (size - _SLICE) // (_SLICES - 1))
                digest.update(file.read(_SLICE))
    if not counted:
        raise UnusableModel(f"no embedding model in {folder}")
    return digest.hexdigest()[:32]
