"""The first thing a new user runs: finding a Python that is new enough."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_venv.sh"


def fake_python(folder: Path, version: str) -> None:
    python = folder / "python3"
    # What the script asks is whether the version is too old; what it prints is for people.
    python.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit 1\n'
    )
    python.chmod(0o755)


def run(path: Path, target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shutil.which("sh") or "/bin/sh", SCRIPT, target],
        env={"PATH": str(path)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_python_too_old_is_refused_with_what_to_install(tmp_path):
    fake_python(tmp_path, "3.9.6")
    done = run(tmp_path, tmp_path / "venv")
    assert done.returncode == 1
    assert "needs Python 3.11 or newer; found: Python 3.9.6" in done.stderr
    assert "brew install python" in done.stderr
    assert "apt install python" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_no_python_at_all_is_told_as_well(tmp_path):
    done = run(tmp_path, tmp_path / "venv")
    assert done.returncode == 1
    assert "found: no python3" in done.stderr


@pytest.mark.timeout(120)
def test_a_named_python_that_is_new_enough_makes_the_environment(tmp_path):
    import sys

    done = run(Path(os.defpath), tmp_path / "venv", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "venv" / "bin" / "python").exists()
