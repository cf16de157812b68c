"""The package as others see it: its names, its imports, its start."""

import ast
import subprocess
import sys
from pathlib import Path

import ingest
from ingest.errors import IngestError

PACKAGE = Path(ingest.__file__).parent


def test_every_public_name_can_be_had_and_every_error_is_in_the_tree():
    for name in ingest.__all__:
        found = getattr(ingest, name)
        if isinstance(found, type) and issubclass(found, Exception):
            assert issubclass(found, IngestError)


def test_ingest_knows_neither_the_engine_nor_the_front_door():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])]
            modules = [getattr(node, "module", None) or "", *names]
            assert not any(m.split(".")[0] in ("app", "dflash_engine") for m in modules), path


def test_importing_the_whole_package_loads_nothing_heavy():
    code = (
        "import sys, ingest; [getattr(ingest, n) for n in ingest.__all__];"
        "print([m for m in ('numpy', 'torch', 'chromadb', 'pypdfium2', 'transformers')"
        " if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        check=True,
    )
    assert out.stdout.strip() == "[]"
