"""Other engines for DFlash, each a child process in an environment of its own.

A folder of peers has one virtual environment for each package, named as the package is. Between
prompts a peer waits, so that a bench can give each prompt to all ways of answering in turn, and
what slows the machine slows them all. The other end of the line is ``drivers/line.py``.

>>> for name in installed(folder):
...     for mode in offered(name, draft=False):
...         with start(name, mode, interpreter(folder, name), target_folder) as peer:
...             peer.answer(prompt, 64)
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.utils import save_model

from .. import blas, hub
from ..errors import EngineError
from ..targets import Target
from .answer import Answer

DRIVERS = {
    name: Path(__file__).parent / "drivers" / f"drive_{name.replace('-', '_')}.py"
    for name in ("dflash", "dflash-mlx", "mlx-dspark")
}
# What of our environment a peer sees: where programs are, and how many threads to use.
_PASSED = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", *blas.WAITING)
_LAST_LINES = 8
_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken")  # of a tokenizer, beside the weights


class PeerError(EngineError):
    """Another engine is not installed, cannot run these models, died, or took too long."""


def interpreter(folder: Path, name: str) -> Path:
    """The Python of ``name``'s environment in a folder of peers."""
    return folder / name / "bin" / "python"


def installed(folder: Path) -> list[str]:
    """The peers that have an environment in ``folder``."""
    return [name for name in DRIVERS if interpreter(folder, name).exists()]


def offered(name: str, draft: bool) -> list[str]:
    """What ``name`` can do with a target, and a DFlash ``draft`` if there is one.

    ``plain`` is without speculation, ``lookup`` copies from the text, ``block`` uses the draft.
    """
    alone = ["plain", "lookup"] if name == "mlx-dspark" else []
    return [*alone, "block"] if draft else alone


def export(target: Target, source: Path, folder: Path) -> None:
    """Write ``target``, which was loaded from ``source``, so that mlx-lm loads from ``folder`` the
    same numbers in the same precision. Call it on the target's thread.
    """
    save_model(folder, target.model)
    names = (name for name, _ in tree_flatten(target.model.parameters()))
    dense = not any(name.endswith(".scales") for name in names)
    config = json.loads((source / "config.json").read_text())
    if dense:
        for part in (config, config.get("text_config", {})):
            part.pop("quantization", None)
            part.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    of_weights = {"config.json", "model.safetensors.index.json", hub.SOURCE_FILE}
    if dense:
        of_weights.add("hf_quant_config.json")
    for file in source.iterdir():
        if file.suffix in _TEXTS and file.name not in of_weights:
            shutil.copy(file, folder)


def start(
    name: str,
    mode: str,
    python: Path,
    target: Path,
    draft: Path | None = None,
    *,
    stop: Collection[int] = (),
    starting: float = 600,
    answering: float = 600,
) -> "Peer":
    """Start ``name`` in ``mode`` with the models in the folders ``target`` and ``draft``, and wait
    until they are loaded.

    An answer is cut after the first of the ``stop`` tokens. ``starting`` and ``answering``: seconds
    until it is given up. Raises PeerError.
    """
    if name not in DRIVERS:
        raise PeerError(f"{name!r} is none of the peers that are known: {', '.join(DRIVERS)}")
    if mode not in offered(name, draft is not None):
        raise PeerError(f"{name} has no mode {mode!r} {'with' if draft else 'without'} a draft")
    if not python.exists():
        raise PeerError(
            f"{name} is not installed: there is no {python}. Make a virtual environment there, "
            f"and install {name} into it"
        )
    config = {
        "mode": mode,
        "target": str(target.absolute()),
        "draft": str(draft.absolute()) if draft else None,
        "libraries": blas.load().libraries,
        "stop": sorted(stop),
    }
    command = [str(python), str(DRIVERS[name]), json.dumps(config)]
    return Peer(f"{name} {mode}", command, starting, answering)


class Peer:
    """A package that answers prompts, greedily; ``name`` is of package and mode.

    ``version`` is the package's; ``mlx`` and ``mlx_lm`` are those of what it runs on. Close it, or
    use it in a ``with``: its processes are then gone, whatever they were doing.
    """

    def __init__(self, name: str, command: list[str], starting: float, answering: float) -> None:
        self.name = name
        self._limit = answering
        self._closed = False
        # Packages keep calibrations and caches at home: each peer begins with a new one.
        self._home = tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True)
        self._said = Path(self._home.name) / "said.txt"
        try:
            with self._said.open("wb") as said:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    env=_environment(self._home.name),
                    start_new_session=True,  # so that what it starts can be ended with it
                )
        except OSError as error:
            self._home.cleanup()
            raise PeerError(f"{name} cannot be started: {error}") from error
        try:
            about = self._ask(None, starting)
        except BaseException:
            self.close()
            raise
        self.version, self.mlx, self.mlx_lm = about["version"], about["mlx"], about["mlx_lm"]

    def answer(self, prompt: Sequence[int], most: int) -> Answer:
        """At most ``most`` tokens after ``prompt``.

        Raises PeerError. Where the package raised an error of its own, the peer can be asked again.
        """
        if self._closed:
            raise PeerError(f"{self.name} is closed: start it again")
        question = {"prompt": [int(token) for token in prompt], "max_tokens": most}
        told = self._ask(question, self._limit)
        return Answer(
            tokens=told["tokens"],
            first=told["first"],
            total=told["total"],
            rounds=told["rounds"],
            peak=told["peak"],
        )

    def _ask(self, question: dict[str, Any] | None, limit: float) -> dict[str, Any]:
        # Without a question: what a peer says when it is ready.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._kill()  # which ends the waiting below

        timer = threading.Timer(limit, end)
        timer.start()
        line = b""
        try:
            with suppress(BrokenPipeError):
                if question is not None:
                    self._process.stdin.write(json.dumps(question).encode() + b"\n")
                    self._process.stdin.flush()
                line = self._process.stdout.readline()
        except BaseException:
            self.close()  # its answer would be taken for that to the next question
            raise
        finally:
            timer.cancel()
        if late.is_set():
            raise self._failure(f"took more than {limit:g} seconds and was ended")
        if not line:
            raise self._failure(self._ending())
        try:
            told: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._failure(f"said {line[:80]!r}, which is no answer") from None
        if "error" in told:
            raise PeerError(f"{self.name}: {told['error']}")
        return told

    def _failure(self, what: str) -> PeerError:
        lines = self._said.read_text(encoding="utf-8", errors="replace").splitlines()
        self.close()
        return PeerError("\n    ".join([f"{self.name} {what}", *lines[-_LAST_LINES:]]))

    def _ending(self) -> str:
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "hung up"
        if status >= 0:
            return f"ended with status {status}"
        return f"was ended by {signal.Signals(-status).name}" + (
            ": is there memory enough?" if status == -signal.SIGKILL else ""
        )

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS forbids it once it is dead
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End its processes and remove its home. May be repeated."""
        if self._closed:
            return
        self._closed = True
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # of what could not be written
                pipe.close()
        self._home.cleanup()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _environment(home: str) -> dict[str, str]:
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED or name.endswith("_NUM_THREADS")
    }
    return passed | {"HOME": home, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
