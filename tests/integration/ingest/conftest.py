"""A real model, a real Chroma, a home and a data folder in tmp_path."""

import pytest

from ingest import Embedder, EmbeddingModel, Home, Index


@pytest.fixture(scope="session")
def minilm(minilm_folder):
    return Embedder(EmbeddingModel.named("all-MiniLM-L6-v2"), minilm_folder)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def home(tmp_path):
    home = Home(tmp_path / "home")
    with home.lock():
        yield home


@pytest.fixture
def index(home, minilm, data):
    with Index.open(home, minilm, data) as index:
        yield index
