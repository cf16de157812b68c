"""Power cuts, damaged folders, second owners: an index comes back whole or says who has it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingest import Home, HomeLocked, Index

ROOT = Path(__file__).parents[3]

# A process that ingests with vectors made of letters (quick), and kills itself at a given point.
VICTIM = """
import os, signal, sys
from pathlib import Path
import numpy as np
from ingest import EmbeddingModel, Home, Index
from ingest.library import Library
from ingest.vectors import Vectors

home, data, point = sys.argv[1:]
model = Path(home).with_name("model")
model.mkdir(exist_ok=True)
(model / "config.json").write_text("{}")

class Letters:
    folder = model
    model = EmbeddingModel("letters", 64)
    max_tokens = 256
    def count_tokens(self, text):
        return len(text.split())
    def embed_passages(self, texts, on_batch=None):
        rows = np.zeros((len(texts), 64), np.float32)
        for row, text in zip(rows, texts):
            for at, sign in enumerate(text):
                row[(ord(sign) * (at % 7 + 1)) % 64] += 1
            row /= np.linalg.norm(row)
        if on_batch:
            on_batch(len(texts))
        return rows

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def dying(cls, name, before, time=2):
    real, calls = getattr(cls, name), []
    def call(*args, **kwargs):
        calls.append(1)
        if before and len(calls) == time:
            die()
        result = real(*args, **kwargs)
        if not before and len(calls) == time:
            die()
        return result
    setattr(cls, name, call)

if point == "library-in":
    import ingest.library
    dying(ingest.library, "_insert", True, 5)
if point == "library-done":
    dying(Library, "replace", False)
if point == "chroma-in":
    dying(Vectors, "add", False)
if point == "chroma-done":
    dying(Vectors, "delete", False)
if point == "removed":
    dying(Library, "remove", False, 1)
if point == "opening":
    dying(Vectors, "check", True, 1)

def on_event(event):
    if point == event.kind and event.index == 2:
        die()

with Home(home).lock() as held, Index.open(held, Letters(), data) as index:
    summary = index.ingest([data], on_event=on_event)
    ids = index._library.ids()
    passages = sorted(index.passages(list(ids)), key=lambda p: (p.file, p.ordinal))
    assert set(index._vectors._collection.get(include=[])["ids"]) == ids
    assert index._vectors.check()
    assert not Path(str(held.chroma) + ".opening").exists()
    import json
    print(json.dumps([[p.id, p.file, p.text] for p in passages]))
"""


def victim(home, data, point="never"):
    return subprocess.run(
        [sys.executable, "-c", VICTIM, str(home), str(data), point],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )


def write_version(data, version):
    for name in "abcd":
        text = "\n\n".join(f"Version {version} of {name}, part {n}. " * 40 for n in range(3))
        (data / f"{name}.txt").write_text(text)
    if version == 2:
        (data / "d.txt").unlink()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What an index that was never disturbed holds."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "data").mkdir()
    write_version(folder / "data", 1)
    write_version(folder / "data", 2)
    run = victim(folder / "home", folder / "data")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def first_version(tmp_path_factory):
    """A home and data folder after a first, calm ingest."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "data").mkdir()
    write_version(folder / "data", 1)
    run = victim(folder / "home", folder / "data")
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.parametrize(
    "point",
    ["embedding", "library-in", "library-done", "chroma-in", "chroma-done", "removed", "opening"],
)
def test_killed_at_any_instant_and_run_again_it_ends_the_same(
    tmp_path, first_version, expected, point
):
    shutil.copytree(first_version, tmp_path, dirs_exist_ok=True)
    home, data = tmp_path / "home", tmp_path / "data"
    write_version(data, 2)
    assert victim(home, data, point).returncode == -signal.SIGKILL
    assert Home(home).owner() is None
    again = victim(home, data)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == expected
    assert len({id for id, _, _ in expected}) == len(expected) > 6


@pytest.fixture
def filled(home, minilm, data):
    for n in range(3):
        (data / f"{n}.txt").write_text(f"Number {n} is about {('tea', 'cups', 'mugs')[n]}.")
    with Index.open(home, minilm, data) as index:
        index.ingest([data])
    return home


def answers(home, minilm, data):
    with Index.open(home, minilm, data) as index:
        assert index._vectors.check()
        found = index.dense(minilm.embed_queries(["mugs"])[0], 1)
        return index.passages([found[0][0]])[0].text


def test_chroma_is_made_again_when_its_database_is_garbage(filled, minilm, data):
    (filled.chroma / "chroma.sqlite3").write_bytes(b"garbage" * 500)
    assert answers(filled, minilm, data) == "Number 2 is about mugs."


def test_chroma_is_made_again_when_its_folder_is_gone(filled, minilm, data):
    for path in sorted(filled.chroma.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    filled.chroma.rmdir()
    assert answers(filled, minilm, data) == "Number 2 is about mugs."


def test_wrong_vectors_in_chroma_are_noticed(filled, minilm, data):
    with Index.open(filled, minilm, data) as index:
        ids = sorted(index._library.ids())
        swapped = index._library.vectors(ids)
        index._vectors.add({ids[0]: swapped[ids[1]], ids[1]: swapped[ids[0]]})
        assert not index._vectors.check()
    assert answers(filled, minilm, data) == "Number 2 is about mugs."


def test_a_start_that_never_came_back_is_followed_by_a_fresh_chroma(filled, minilm, data):
    (filled.chroma / "left over").touch()
    filled.chroma.with_name("chroma.opening").touch()
    assert answers(filled, minilm, data) == "Number 2 is about mugs."
    assert not (filled.chroma / "left over").exists()


OWNER = """
import sys, time
from ingest import Home
home = Home(sys.argv[1])
home.acquire()
home.announce("http://127.0.0.1:8321", "token")
print("owned", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_told_who_owns_the_home_until_that_one_dies(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "home")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert owner.stdout.readline() == "owned\n"
        home = Home(tmp_path / "home")
        facts = home.owner()
        assert (facts.pid, facts.url, facts.token) == (owner.pid, "http://127.0.0.1:8321", "token")
        with pytest.raises(HomeLocked, match=f"{owner.pid}.*8321"):
            home.acquire()
        assert (home.path / "owner.json").stat().st_mode & 0o777 == 0o600
        assert home.path.stat().st_mode & 0o777 == 0o700
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert home.owner() is None
    with home.lock():
        assert home.owner().pid == os.getpid()
    assert home.owner() is None
