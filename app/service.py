"""What a running installation is made of: the home's lock, the index, the models."""

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Literal

from dflash_engine import DFlash, hub
from dflash_engine.errors import EngineClosedError
from dflash_engine.integrations.llama_index import DFlashLLM
from ingest import Embedder, Home, Index, IngestEvent, IngestSummary, UnusableModel
from ingest.embed import MODELS, EmbeddingModel

from .errors import LibraryUnusableError, NotReadyError
from .rag.answer import Answerer
from .settings import Settings

log = logging.getLogger(__name__)
MB = 1024 * 1024


class Service:
    """Owns a home: opens its index, then loads the target, in a thread of its own.

    ``state`` is ``loading``, ``ready`` or ``failed``; ``problem`` says why it failed.
    """

    def __init__(self, settings: Settings, home: Home) -> None:
        """Take ``home``'s lock at once (HomeLocked if another process has it); load later."""
        self.settings = settings
        self.home = home
        home.acquire()
        self.state: Literal["loading", "ready", "failed"] = "loading"
        self.problem = ""
        self._index: Index | None = None
        self._answerer: Answerer | None = None
        self._engine: DFlash | None = None
        self._indexed = threading.Event()
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._load, name="load", daemon=True)
        self._thread.start()

    @property
    def index(self) -> Index:
        """The index, which opens before the models are loaded; waits for it."""
        self._indexed.wait()
        if self._index is None:
            raise NotReadyError(self.problem)
        return self._index

    @property
    def answerer(self) -> Answerer:
        """The one to ask; NotReadyError until everything is loaded."""
        if self._answerer is None:
            raise NotReadyError(self.problem or "the models are being loaded: try again shortly")
        return self._answerer

    def wait(self) -> None:
        """Return when loading has ended, well or not."""
        self._loaded.wait()

    def _load(self) -> None:
        try:
            embedder = open_embedder(self.settings)
            self._index = open_index(self.settings, self.home, embedder)
            self._indexed.set()
            embedder.embed_queries([""])  # or the first question would wait for its weights
            self._engine = open_engine(self.settings)
            llm = DFlashLLM(self._engine)
            if self._gone(self._engine):
                self._forget_gone()
            self._answerer = Answerer(self._index, embedder, llm, self.settings)
            self.state = "ready"
        except Exception as error:  # noqa: BLE001 - told by /health, whatever it is
            self.state = "failed"
            self.problem = str(error) or type(error).__name__
            log.error("no question can be answered: %s", self.problem)
        finally:
            self._indexed.set()
            self._loaded.set()

    def ingest(
        self,
        paths: Iterable[str],
        on_event: Callable[[IngestEvent], None] | None = None,
        rebuild: bool = False,
        should_stop: Callable[[], bool] | None = None,
    ) -> IngestSummary:
        """:meth:`ingest.Index.ingest`, after which the engine forgets what has gone."""
        return ingest(self.index, paths, on_event, self._forget_gone, rebuild, should_stop)

    def _forget_gone(self) -> None:
        engine = self._engine
        with suppress(EngineClosedError):  # then the next start does it
            if engine is not None:
                engine.forget(self._gone(engine))

    def _gone(self, engine: DFlash) -> set[str]:
        return gone(self.index, engine.memory.owners if engine.memory else set())

    def stop_answering(self) -> None:
        """End answers under way with EngineClosedError, and begin no more."""
        self._thread.join()
        self._answerer = None
        self.problem = self.problem or "the server is being stopped"
        if self._engine is not None:
            self._engine.close()

    def close(self) -> None:
        """Stop answering, close the index, give the home back."""
        self.stop_answering()
        if self._index is not None:
            self._index.close()
        self.home.release()

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_engine(settings: Settings) -> DFlash:
    """The engine the settings ask for."""
    return DFlash(
        settings.target_model,
        None if settings.draft_model == "none" else settings.draft_model,
        drafter=settings.drafter,
        models=settings.models_folder,
        precision=settings.precision,
        draft_bits=settings.draft_bits,
        kv_bits=settings.kv_bits,
        context=settings.context,
        strict=settings.strict,
        template_args={"enable_thinking": settings.thinking},
        max_waiting=settings.max_waiting,
        store=store(settings),
        prefix_bytes=settings.prefix_mb * MB,
        prefix_disk_bytes=settings.prefix_disk_mb * MB,
        memory_tokens=settings.memory_tokens,
    )


def store(settings: Settings) -> Path:
    """The folder of what the engine keeps."""
    return settings.home / "engine"


def ingest(
    index: Index,
    paths: Iterable[str | PathLike[str]],
    on_event: Callable[[IngestEvent], None] | None,
    forget: Callable[[], None],
    rebuild: bool = False,
    should_stop: Callable[[], bool] | None = None,
) -> IngestSummary:
    """:meth:`ingest.Index.ingest`, and ``forget`` after it if any document changed or went."""
    changed = False

    def note(event: IngestEvent) -> None:
        nonlocal changed
        changed = changed or event.kind in ("done", "removed")
        if on_event:
            on_event(event)

    try:
        return index.ingest(paths, note, rebuild, should_stop)
    finally:
        if changed:
            forget()


def gone(index: Index, ids: AbstractSet[str]) -> set[str]:
    """Those of some passages that the index has no more; an id names its file's content too."""
    return set(ids) - {passage.id for passage in index.passages(sorted(ids))}


def open_embedder(settings: Settings) -> Embedder:
    """The embedding model the settings ask for; its weights are loaded on first use."""
    folder = hub.resolve(settings.embedding_model, settings.models_folder)
    return Embedder(embedding_model(settings.embedding_model), folder)


def open_index(
    settings: Settings, home: Home, embedder: Embedder, *, rebuild: bool = False
) -> Index:
    """The index in ``home``, which must be held. Also raises LibraryUnusableError."""
    try:
        return Index.open(
            home,
            embedder,
            settings.data.resolve(),
            rebuild=rebuild,
            max_bytes=settings.max_file_mb * MB,
        )
    except sqlite3.DatabaseError as error:
        raise LibraryUnusableError(
            f"{home.library} cannot be used: {error}. If it is damaged, move it away with the "
            "files beside it of that name and run 'dflash-rag ingest', which makes it anew"
        ) from error


def embedding_model(name: str) -> EmbeddingModel:
    """What is known of the model behind ``name``, also where it is a folder: by its last part.

    A model's query instruction depends on it, and is lost where only full names are looked up.
    """
    wanted = Path(hub.short_name(name)).name.lower()
    for model in MODELS.values():
        if model.name.split("/")[-1].lower() == wanted:
            return model
    known = ", ".join(model.split("/")[-1].lower() for model in MODELS)
    raise UnusableModel(f"embedding model {name!r} is not known; known: {known}")


def stand_in(settings: Settings) -> bool:
    """Whether the target is the small one that runs where no model hub is reached."""
    return hub.short_name(settings.target_model) == "smollm2-135m"
