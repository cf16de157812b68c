"""The command line answers at once when it is only asked what it can do."""

import json
import statistics
import subprocess
import sys
import time

RUN_HELP = """
import json, sys
from app.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(sys.modules)))
"""


def test_help_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", RUN_HELP, "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "Usage" in done.stdout
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    heavy = {"torch", "mlx", "mlx_lm", "chromadb", "fastapi", "uvicorn", "transformers", "numpy"}
    assert modules & (heavy | {"llama_index", "sentence_transformers", "pypdfium2"}) == set()


def test_help_takes_less_than_half_a_second():
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "app.cli", "--help"], capture_output=True, check=True, timeout=30
        )
        return time.perf_counter() - start

    # The first run compiles bytecode; other programs may get in the way of some.
    times = [seconds() for _ in range(7)]
    assert statistics.median(times) < 0.5, times
