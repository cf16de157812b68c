"""Which embedding models this project knows, and one of them at work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.errors import UnusableModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Passages are embedded this many at a time, so that a question waits for at most one such batch.
_BATCH = 8


@dataclass(frozen=True)
class EmbeddingModel:
    """What must be known of a model to use it as it was trained.

    `scripts` says which writing it understands ("latin", "han"); `min_cosine` is the cosine under
    which a passage is hardly ever about the question: a starting value, to be calibrated on a
    customer's own documents.
    """

    name: str
    dimension: int
    query_prefix: str = ""
    passage_prefix: str = ""
    scripts: frozenset[str] = frozenset({"latin"})
    min_cosine: float = 0.3

    @classmethod
    def named(cls, name: str) -> EmbeddingModel:
        """A model from the table; raises `UnusableModel` naming those there are."""
        try:
            return MODELS[name]
        except KeyError:
            known = ", ".join(MODELS)
            raise UnusableModel(f"unknown embedding model {name!r}; known: {known}") from None


_BOTH = frozenset({"latin", "han"})
MODELS: dict[str, EmbeddingModel] = {
    model.name: model
    for model in (
        # 0.37: with a share of words beside it, 99% of 300 XQuAD questions on 120 indexed
        # paragraphs pass, and 13% of 300 on others.
        EmbeddingModel("all-MiniLM-L6-v2", 384, min_cosine=0.37),
        EmbeddingModel("BAAI/bge-m3", 1024, scripts=_BOTH, min_cosine=0.45),
        EmbeddingModel(
            "BAAI/bge-small-zh-v1.5",
            512,
            query_prefix="为这个句子生成表示以用于检索相关文章：",
            scripts=_BOTH,
            min_cosine=0.4,
        ),
        EmbeddingModel(
            "BAAI/bge-small-en-v1.5",
            384,
            query_prefix="Represent this sentence for searching relevant passages: ",
            min_cosine=0.55,
        ),
    )
}


class Embedder:
    """A sentence-transformers model in a local folder; nothing is loaded before its first use.

    Safe to use from several threads: questions, and what else is urgent, go ahead of passages that
    are being embedded.
    Raises `UnusableModel` on first use when the folder holds no such model.
    """

    def __init__(self, model: EmbeddingModel, folder: str | os.PathLike[str]) -> None:
        self.model = model
        self.folder = Path(folder)
        self._turn = threading.Condition()
        self._busy = False
        self._urgent = 0  # calls that go first, waiting or under way
        self._tokenizer_lock = threading.Lock()
        self._loading = threading.Lock()
        self._loaded: Any = None

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of questions: `[n, dimension]` float32, each of length 1."""
        with self._precedence(urgent=True):
            return self._encode([self.model.query_prefix + text for text in texts], urgent=True)

    def embed_passages(
        self,
        texts: Sequence[str],
        on_batch: Callable[[int], None] | None = None,
        *,
        urgent: bool = False,
    ) -> NDArray[np.float32]:
        """Vectors of passages: `[n, dimension]` float32, each of length 1.

        `on_batch` hears how many are done; what it raises ends the work. `urgent` is for what
        somebody waits for: it goes first, as questions do.
        """
        import numpy as np

        parts = [np.zeros((0, self.model.dimension), np.float32)]
        with self._precedence(urgent):
            for at in range(0, len(texts), _BATCH):
                batch = [self.model.passage_prefix + text for text in texts[at : at + _BATCH]]
                parts.append(self._encode(batch, urgent))
                if on_batch is not None:
                    on_batch(min(at + _BATCH, len(texts)))
        return np.concatenate(parts)

    def count_tokens(self, text: str) -> int:
        """How many of the model's tokens a text is, without the special ones."""
        with self._tokenizer_lock:
            ids = self._tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return len(ids["input_ids"])

    @cached_property
    def max_tokens(self) -> int:
        """How many tokens of a passage the model reads; what comes after is not seen by it."""
        special = int(self._tokenizer.num_special_tokens_to_add())
        prefix = self.count_tokens(self.model.passage_prefix) if self.model.passage_prefix else 0
        return int(self._network.max_seq_length or 512) - special - prefix

    @contextmanager
    def _precedence(self, urgent: bool) -> Iterator[None]:
        """Within this, when `urgent`, nothing else gets a turn than what is urgent too."""
        with self._turn:
            self._urgent += urgent
        try:
            yield
        finally:
            with self._turn:
                self._urgent -= urgent
                self._turn.notify_all()

    def _encode(self, texts: list[str], urgent: bool) -> NDArray[np.float32]:
        import numpy as np

        with self._turn:
            self._turn.wait_for(lambda: not self._busy and (urgent or not self._urgent))
            self._busy = True
        try:
            vectors = self._network.encode(
                texts,
                batch_size=_BATCH,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()
        return np.asarray(vectors, np.float32).reshape(len(texts), self.model.dimension)

    @property
    def _network(self) -> Any:
        with self._loading:
            if self._loaded is not None:
                return self._loaded
            _stay_offline()
            self._check_folder()
            from sentence_transformers import SentenceTransformer

            try:
                with _without_progress_bars():
                    network = SentenceTransformer(
                        str(self.folder), device=_device(), local_files_only=True
                    )
            except (OSError, ValueError) as error:
                raise UnusableModel(f"no model can be loaded from {self.folder}: {error}") from None
            dimension = network.get_embedding_dimension()
            if dimension != self.model.dimension:
                raise UnusableModel(
                    f"{self.folder} gives vectors of {dimension} numbers; "
                    f"{self.model.name} has {self.model.dimension}"
                )
            self._loaded = network
            return network

    @cached_property
    def _tokenizer(self) -> Any:
        # Our own copy: the network's truncates, and must not be shared between threads.
        _stay_offline()
        self._check_folder()
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise UnusableModel(f"no tokenizer in {self.folder}: {error}") from None

    def _check_folder(self) -> None:
        if not (self.folder / "config.json").is_file():
            raise UnusableModel(
                f"no embedding model in {self.folder}; run `dflash-rag models pull`"
            )


def _stay_offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    # The variable above is too late when somebody has imported huggingface_hub before.
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _device() -> str:
    import platform

    if platform.system() != "Darwin":
        return "cpu"
    import torch

    return "mps" if torch.backends.mps.is_available() else "cpu"
