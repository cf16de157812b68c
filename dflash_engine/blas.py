"""A fast BLAS for MLX on Linux.

The Linux CPU build of MLX links the reference BLAS, tens of times slower than an optimised one.
MLX finds ``cblas_sgemm`` through the process's global symbols, so an optimised library loaded with
``RTLD_GLOBAL`` *before* ``mlx.core`` is imported takes its place. On macOS MLX uses Accelerate and
Metal, and nothing is done.
"""

import ctypes
import ctypes.util
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "DFLASH_RAG_BLAS"
# How GNU's OpenMP, which reads this when it is loaded, lets threads wait for one another: spinning,
# then asleep. By default they spin 30 times longer, and hardly at all once several threads of a
# process have teams of their own, as with embeddings beside a model. Measured on two virtual cores,
# ms a token of SmolLM2-135M: alone 50 to 57 either way, with two teams 84 by default and 66 so, and
# beside a second process that does the same 4,600 and 620.
WAITING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "10000"}


@dataclass(frozen=True)
class Blas:
    """Which BLAS MLX uses in this process.

    ``name`` is for people; ``fast`` is False when MLX runs on the reference BLAS; ``problem`` says
    what to do about it, or is empty. ``libraries``: what was loaded, in order.
    """

    name: str
    fast: bool
    problem: str = ""
    libraries: tuple[str, ...] = ()


_loaded: Blas | None = None


def load() -> Blas:
    """Load the best BLAS found, once a process; later calls return the first one's answer.

    ``DFLASH_RAG_BLAS`` names a shared library to load instead, or ``none`` for MLX's own.
    """
    global _loaded
    if _loaded is None:
        _loaded = _load()
    return _loaded


def _load() -> Blas:
    if sys.platform != "linux":
        return Blas("Accelerate", fast=True)
    wanted = os.environ.get(ENVIRONMENT, "")
    if wanted == "none":
        return Blas("reference (MLX's own)", fast=False, problem=f"{ENVIRONMENT}=none is set")
    if "mlx.core" in sys.modules:
        return Blas(
            "unknown",
            fast=False,
            problem="mlx was imported before dflash_engine, so a fast BLAS could not be loaded: "
            "import dflash_engine first",
        )
    if wanted:
        if _open(Path(wanted)):
            return Blas(wanted, fast=True, libraries=(wanted,))
        return Blas(
            "reference (MLX's own)",
            fast=False,
            problem=f"{ENVIRONMENT}={wanted} could not be loaded as a shared library",
        )
    if not any(name in os.environ for name in WAITING):
        os.environ |= WAITING
    for name, libraries in _candidates():
        if all(_open(library) for library in libraries):
            return Blas(name, fast=True, libraries=tuple(map(str, libraries)))
    return Blas(
        "reference (MLX's own)",
        fast=False,
        problem="no fast BLAS found: pip install torch (its CPU build carries one), or install "
        "the system package libopenblas0-pthread",
    )


def _candidates() -> list[tuple[str, list[Path]]]:
    found: list[tuple[str, list[Path]]] = []
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        folder = Path(spec.origin).parent / "lib"
        found.append(("torch", [folder / "libc10.so", folder / "libtorch_cpu.so"]))
    openblas = ctypes.util.find_library("openblas")
    if openblas:
        found.append((openblas, [Path(openblas)]))
    return found


def _open(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def measure(size: int = 1024, seconds: float = 0.5) -> float:
    """Square fp32 matrix products in MLX on this process's BLAS, in GFLOP/s (the best of a few)."""
    import time

    import mlx.core as mx

    a = mx.random.normal((size, size))
    mx.eval(a @ a)
    best = 0.0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        mx.eval(a @ a)
        best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e9)
    return best
