"""``dflash-rag doctor``: what this installation has, what is wrong, and how to mend it."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import psutil
from rich.console import Console
from rich.table import Table

from dflash_engine import EngineError, blas, fit, hub, registry
from dflash_engine.errors import NotEnoughMemoryError
from ingest import Home, HomeLocked, IngestError

from .errors import AppError
from .settings import Settings

PACKAGES = (
    "dflash-rag",
    "mlx",
    "mlx-lm",
    "torch",
    "transformers",
    "sentence-transformers",
    "llama-index-core",
    "chromadb",
    "fastapi",
    "uvicorn",
    "pypdfium2",
)
LEAST_MEMORY_GIB = 4
LEAST_DISK_GIB = 2


@dataclass(frozen=True)
class Check:
    """One finding. ``problem`` says what is wrong and what to do; empty when all is well."""

    name: str
    finding: str
    problem: str = ""


def run(settings: Settings, *, as_json: bool) -> int:
    """Print every check and return the exit status: 1 if any found a problem."""
    checks = [
        _python(),
        _blas(),
        _memory(),
        _disk(settings),
        _versions(),
        *_models(settings),
        _try("fit", _fit, settings),
        _try("home", _owner, settings),
        _try("port", _port, settings),
        _try("index", _index, settings),
    ]
    if as_json:
        json.dump([asdict(check) for check in checks], sys.stdout, indent=2, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        _print(checks)
    return 1 if any(check.problem for check in checks) else 0


def _try(name: str, check: Callable[[Settings], Check], settings: Settings) -> Check:
    # What is broken enough to break its check is what a doctor is asked about.
    try:
        return check(settings)
    except Exception as error:  # noqa: BLE001 - a finding, whatever it is
        return Check(name, str(settings.home.absolute()), f"{type(error).__name__}: {error}")


def _print(checks: list[Check]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in checks:
        state = "[red]wrong[/]" if check.problem else "[green]ok[/]"
        table.add_row(state, check.name, check.finding)
    console = Console()
    console.print(table)
    for check in checks:
        if check.problem:
            console.print(f"{check.name}: {check.problem}", style="red", markup=False)


def _python() -> Check:
    system = f"{platform.system()} {platform.machine()}"
    supported = system in ("Darwin arm64", "Linux x86_64", "Linux aarch64")
    return Check(
        "python",
        f"{platform.python_version()} on {system}, {os.cpu_count()} cores",
        "" if supported else "only macOS on Apple Silicon and Linux are supported",
    )


def _blas() -> Check:
    used = blas.load()
    if sys.platform != "linux":
        return Check("BLAS", f"{used.name}, {blas.measure():.0f} GFLOP/s")
    # MLX keeps the BLAS it started with, so each figure is of a process of its own.
    before, after = _gflops({blas.ENVIRONMENT: "none"}), _gflops({})
    finding = f"{used.name}: {after:.0f} GFLOP/s, {before:.1f} without it"
    return Check("BLAS", finding, used.problem)


def _gflops(environment: dict[str, str]) -> float:
    program = "from dflash_engine import blas; print(blas.measure())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    total, free = memory.total / 2**30, memory.available / 2**30
    problem = ""
    if free < LEAST_MEMORY_GIB:
        problem = f"less than {LEAST_MEMORY_GIB} GiB are free: close other programs"
    return Check("memory", f"{free:.1f} of {total:.1f} GiB free", problem)


def _disk(settings: Settings) -> Check:
    home = settings.home.absolute()
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(there).free / 2**30
    problem = ""
    if not os.access(there, os.W_OK):
        problem = f"{there} cannot be written: choose another with --home"
    elif free < LEAST_DISK_GIB:
        problem = f"less than {LEAST_DISK_GIB} GiB are free for {home}: make room"
    return Check("disk", f"{free:.0f} GiB free for {home}", problem)


def _versions() -> Check:
    versions, missing = [], []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    problem = f"not installed: {', '.join(missing)}: run 'make install'" if missing else ""
    return Check("versions", ", ".join(versions), problem)


def _models(settings: Settings) -> list[Check]:
    return [
        _model("target", settings.target_model, settings),
        _draft(settings),
        _model("embeddings", settings.embedding_model, settings),
    ]


def _model(role: str, name: str, settings: Settings) -> Check:
    try:
        return Check(role, f"{name} in {hub.resolve(name, settings.models_folder)}")
    except EngineError as error:
        return Check(role, name, str(error))


def _draft(settings: Settings) -> Check:
    name, wanted = _draft_in_use(settings), settings.draft_name
    if name is not None:
        return _model("draft", name, settings)
    if wanted is not None:
        return Check("draft", f"none here; {wanted} is registered: 'dflash-rag models pull'")
    return Check("draft", f"none; drafter {settings.drafter}")


def _draft_in_use(settings: Settings) -> str | None:
    if settings.draft_model != "auto" or settings.drafter in ("none", "lookup"):
        return settings.draft_name
    return registry.find_draft(settings.target_model, settings.models_folder)


def _fit(settings: Settings) -> Check:
    draft = _draft_in_use(settings)
    try:
        need = fit.check(
            hub.resolve(settings.target_model, settings.models_folder),
            hub.resolve(draft, settings.models_folder) if draft else None,
            context=settings.context,
            precision=settings.precision,
            kv_bits=settings.kv_bits,
            draft_bits=settings.draft_bits,
        )
    except NotEnoughMemoryError as error:
        return Check("fit", settings.target_model, str(error))
    except EngineError:
        return Check("fit", "not known while a model is missing")  # which is told above
    return Check("fit", f"the models need {fit.size(need.total)}: {need}")


def _owner(settings: Settings) -> Check:
    owner = Home(settings.home).owner()
    if owner is None:
        return Check("home", f"{settings.home.absolute()}, used by nobody now")
    at = f", serving at {owner.url}" if owner.url else ""
    return Check("home", f"{settings.home.absolute()}, in use by process {owner.pid}{at}")


def _port(settings: Settings) -> Check:
    from .serving import listen

    try:
        listen(settings.host, settings.port).close()
    except AppError as error:
        owner = Home(settings.home).owner()
        if owner is not None and owner.url and owner.url.endswith(f":{settings.port}"):
            return Check("port", f"{settings.port}: this installation's own server")
        return Check("port", f"{settings.host}:{settings.port}", str(error))
    return Check("port", f"{settings.host}:{settings.port} is free")


def _index(settings: Settings) -> Check:
    from .service import open_embedder, open_index

    home = Home(settings.home)
    if not home.library.exists():
        return Check("index", "none yet: put documents into data/ and run 'dflash-rag ingest'")
    try:
        with home.lock():
            embedder = open_embedder(settings)
            with open_index(settings, home, embedder) as index:
                files = index.files()
                failed = [file.file for file in files if file.state == "failed"]
                return Check(
                    "index",
                    f"{len(files) - len(failed)} files, {index.passage_count} passages",
                    f"not ingested: {', '.join(failed)}: 'dflash-rag ingest' says why"
                    if failed
                    else "",
                )
    except HomeLocked:
        return Check("index", "in use; ask its owner's /health")
    except (AppError, IngestError, EngineError) as error:
        return Check("index", str(home.library), str(error))
