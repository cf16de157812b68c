import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_engine import blas

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX brings a fast BLAS")


def python(code: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in blas.WAITING}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, blas.ENVIRONMENT: "", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


MEASURE = "from dflash_engine import blas; print(blas.measure(512, 0.3)); print(blas.load().fast)"


@linux
def test_matrix_products_are_many_times_faster() -> None:
    fast, was_fast = python(MEASURE).split()
    slow, was_slow = python(MEASURE, **{blas.ENVIRONMENT: "none"}).split()
    assert (was_fast, was_slow) == ("True", "False")
    assert float(fast) > 3 * float(slow)


@linux
def test_says_which_libraries_it_loaded() -> None:
    code = "from dflash_engine import blas; print(*blas.load().libraries, sep='\\n')"
    found = python(code).splitlines()
    assert found
    assert python(code, **{blas.ENVIRONMENT: "none"}) == ""
    if Path(found[-1]).is_absolute():
        assert python(code, **{blas.ENVIRONMENT: found[-1]}) == found[-1]


@linux
def test_threads_spin_shortly_while_they_wait_unless_told_otherwise() -> None:
    code = "import os, dflash_engine; print(*map(os.environ.get, dflash_engine.blas.WAITING))"
    assert python(code) == "active 10000"
    assert python(code, OMP_WAIT_POLICY="passive") == "passive None"
    assert python(code, GOMP_SPINCOUNT="100") == "None 100"


@linux
def test_naming_the_package_loads_it_and_not_mlx() -> None:
    code = (
        "import sys, dflash_engine; from dflash_engine import blas; "
        "print(blas.load().fast, 'mlx.core' in sys.modules, 'torch' in sys.modules)"
    )
    assert python(code) == "True False False"


@linux
def test_mlx_imported_first_is_a_problem() -> None:
    code = "import mlx.core, dflash_engine; print(dflash_engine.blas.load())"
    said = python(code)
    assert "fast=False" in said
    assert "import dflash_engine first" in said


@linux
def test_a_path_that_is_no_library_is_a_problem() -> None:
    said = python("from dflash_engine import blas; print(blas.load())", DFLASH_RAG_BLAS="/no/such")
    assert "fast=False" in said
    assert "DFLASH_RAG_BLAS=/no/such could not be loaded" in said


def test_on_macos_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(blas, "_open", lambda library: pytest.fail("opened a library"))
    monkeypatch.setattr(blas, "_loaded", None)
    assert blas.load() == blas.Blas("Accelerate", fast=True)


@linux
def test_without_any_fast_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(blas.ENVIRONMENT, raising=False)
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k != "mlx.core"})
    monkeypatch.setattr(blas, "_candidates", list)
    found = blas._load()
    assert not found.fast
    assert "pip install torch" in found.problem


def test_loading_happens_once() -> None:
    assert blas.load() is blas.load()
