"""What all tests share. No test uses the network: weights are pulled before, by `make test`."""

import os
from pathlib import Path

import pytest

from dflash_engine import hub

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder with pulled weights."""
    folder = Path(os.environ.get("DFLASH_RAG_TEST_MODELS", REPOSITORY / "var" / "models"))
    missing = [n for n in ("smollm2-135m", "all-minilm-l6-v2") if not hub.is_pulled(n, folder)]
    if missing:
        pytest.exit(f"not in {folder}: {missing}. Run 'make test', which pulls them first", 3)
    return folder


@pytest.fixture(scope="session")
def minilm_folder(models: Path) -> Path:
    """The folder of all-MiniLM-L6-v2."""
    return hub.resolve("all-minilm-l6-v2", models)
