import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from saving import save_threads, soon

from dflash_engine.drafters import memory_file
from dflash_engine.drafters.memory_file import Content, MemoryFile, Text

NEVER = 3600.0  # seconds; a test is over before


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert soon(lambda: not save_threads())


class Kept:
    """Stands for a memory: some texts, and their file."""

    def __init__(self, path: Path, key: str = "tokenizer", seconds: float = NEVER) -> None:
        self.texts: list[Text] = []
        self.file = MemoryFile(path, key, self.content, seconds)

    def content(self) -> Content:
        sizes = [text.size for text in self.texts]
        return Content(list(self.texts), np.arange(sum(sizes), dtype=np.int32) * 1000 - 1)

    def add(self, owner: str) -> None:
        self.texts.append(Text("answer", (owner, "übersicht.pdf"), 90, 3, len(self.texts)))
        self.file.changed()

    def forget(self, owner: str) -> None:
        self.texts = [text for text in self.texts if owner not in text.owners]
        self.file.changed(forgot=True)


def filled(path: Path, seconds: float = NEVER) -> Kept:
    kept = Kept(path, seconds=seconds)
    for owner in ("a", "b"):
        kept.add(owner)
    return kept


def owners(path: Path, key: str = "tokenizer") -> list[str] | None:
    """First owners of the texts that a process would find there."""
    content = Kept(path, key).file.read()
    return None if content is None else [text.owners[0] for text in content.texts]


def full_disk(_: int) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# What is in it.


def test_what_was_written_is_read(tmp_path: Path) -> None:
    kept = filled(tmp_path / "memory")
    kept.texts.append(Text("passage", (), 7, 1, 2**40))
    kept.file.save()
    read = Kept(tmp_path / "memory").file.read()
    assert read is not None
    assert read.texts == kept.texts
    np.testing.assert_array_equal(read.row, kept.content().row)
    assert read.row.dtype == np.int32
    kept.texts.clear()
    kept.file.changed()
    kept.file.save()
    assert owners(tmp_path / "memory") == []


def test_files_of_version_1_stay_readable(tmp_path: Path) -> None:
    head = {"key": "tokenizer", "texts": [["answer", ["a", "b"], 3, 2, 9]]}
    head_bytes = json.dumps(head).encode()
    row = b"\5\0\0\0\0\1\0\0\xff\xff\xff\xff"
    body = len(head_bytes).to_bytes(8, "little") + head_bytes + row
    data = b"dflash-rag memory 1\n" + hashlib.sha256(body).digest() + body
    (tmp_path / "memory").write_bytes(data)
    content = Kept(tmp_path / "memory").file.read()
    assert content is not None
    assert content.texts == [Text("answer", ("a", "b"), 3, 2, 9)]
    assert content.row.tolist() == [5, 256, -1]
    again = MemoryFile(tmp_path / "again", "tokenizer", lambda: content)
    again.changed()
    again.save()
    assert (tmp_path / "again").read_bytes() == data


def test_a_file_damaged_anywhere_holds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "memory"
    filled(path).file.close()
    whole = path.read_bytes()
    for place in [*range(100), *range(100, len(whole), 5)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert owners(path) is None, place
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        assert owners(path) is None, end
    path.write_bytes(whole + b"\0")
    caplog.clear()
    assert owners(path) is None
    assert "memory starts empty" in caplog.text
    assert "damaged" in caplog.text
    path.write_bytes(whole)
    assert owners(path) == ["a", "b"]


def test_a_file_of_another_key_format_or_program_holds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "memory"
    filled(path).file.close()
    own = path.read_bytes()
    assert owners(path, key="another") is None
    assert "'tokenizer'" in caplog.text
    other_format = own.replace(b" 1\n", b" 0\n", 1)
    for foreign in (b"", b"\0" * 100, b"PK\3\4" * 50, other_format):
        path.write_bytes(foreign)
        caplog.clear()
        assert owners(path) is None
        assert "memory starts empty" in caplog.text


def test_where_there_is_no_file_there_is_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert owners(tmp_path / "none") is None
    assert not caplog.records, "a first start is nothing to report"
    assert owners(tmp_path) is None  # a folder
    assert "memory starts empty" in caplog.text
    filled(tmp_path).file.close()
    assert "memory is not saved" in caplog.text


# How it is written.


def test_it_is_its_owners_alone_and_not_written_again_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "memory"
    kept = filled(path)
    kept.file.save()
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    path.unlink()
    kept.file.save()
    Kept(path).file.close()
    assert not path.exists()
    kept.add("c")
    kept.file.save()
    assert path.exists()


@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_kill_while_it_is_written_leaves_the_one_before(tmp_path: Path, where: str) -> None:
    path = tmp_path / "memory"
    filled(path).file.close()
    before = path.read_bytes()
    code = f"""
import os, signal, sys
from pathlib import Path
from dflash_engine.drafters.memory_file import Content, MemoryFile
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
file = MemoryFile(Path(sys.argv[1]), "tokenizer", lambda: file.read())
file.changed()
if {where!r} == "write":
    os.fsync = lambda file: (os.truncate(file, 50), kill())
else:
    Path.replace = kill
file.save()
"""
    ended = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    assert owners(path) == ["a", "b"]
    assert list(tmp_path.iterdir()) == [path], "what the kill left is gone"


def test_of_two_saves_at_once_the_newer_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory"
    kept = filled(path)
    write, begun, slow = memory_file._write, threading.Event(), threading.Event()

    def write_slowly(path: Path, data: bytes) -> None:
        if not begun.is_set():
            begun.set()
            slow.wait(0.3)
        write(path, data)

    monkeypatch.setattr(memory_file, "_write", write_slowly)
    older = threading.Thread(target=kept.file.save)
    older.start()
    begun.wait()
    kept.add("c")
    kept.file.save()
    older.join()
    assert owners(path) == ["a", "b", "c"]


def test_never_two_writes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "memory"
    write, under_way, writes = memory_file._write, threading.Lock(), 0

    def write_alone(path: Path, data: bytes) -> None:
        nonlocal writes
        assert under_way.acquire(blocking=False)
        writes += 1
        write(path, data)
        under_way.release()

    monkeypatch.setattr(memory_file, "_write", write_alone)
    kept = filled(path, seconds=0)

    def work(number: int) -> None:
        for n in range(10):
            kept.add(f"{number}")
            kept.file.save() if n % 2 else kept.forget(f"{number}")

    workers = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    kept.file.close()
    assert writes > 4
    assert owners(path) == [text.owners[0] for text in kept.texts]


# When the disk fails.


def test_a_failing_disk_is_logged_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    path = folder / "memory"
    attempts: list[Path] = []
    write = memory_file._write
    monkeypatch.setattr(
        memory_file, "_write", lambda path, data: (attempts.append(path), write(path, data))
    )
    kept = Kept(path, seconds=0.02)
    for episode in ("first", "second"):
        folder.write_text("a file, where a folder is to be")
        attempts.clear()
        caplog.clear()
        kept.add(episode)
        assert soon(lambda: len(attempts) > 3)
        kept.forget("nobody")
        attempts.clear()
        assert soon(lambda: len(attempts) > 3)
        assert [record.levelname for record in caplog.records] == ["WARNING"], episode
        assert "memory is not saved" in caplog.text
        folder.unlink()
        assert soon(path.exists), "with nothing else added"
        assert soon(lambda: not save_threads())
        assert episode in (owners(path) or [])
        path.unlink()
        folder.rmdir()
    kept.file.close()


def test_a_full_disk_leaves_the_file_before_but_not_what_was_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "memory"
    kept = filled(path)
    kept.file.save()
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(memory_file.os, "fsync", full_disk)
        kept.add("c")
        kept.file.save()
        assert "No space left" in caplog.text
        assert list(tmp_path.iterdir()) == [path]
        assert path.read_bytes() == before
        kept.forget("a")
        kept.file.save()
        assert not path.exists(), "rather nothing than what was to be forgotten"
    kept.file.close()
    assert owners(path) == ["b", "c"]


def test_what_cannot_be_forgotten_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "memory"
    kept = filled(path)
    kept.file.save()
    with monkeypatch.context() as patch:
        patch.setattr(memory_file.os, "fsync", full_disk)
        with monkeypatch.context() as stuck:
            stuck.setattr(Path, "unlink", lambda *_, **__: full_disk(0))
            kept.forget("a")
            kept.file.save()
            kept.add("c")
            kept.file.save()
            assert owners(path) == ["a", "b"]
            assert caplog.text.count("what was to be forgotten is still there") == 1
        kept.file.save()
        assert not path.exists()
    kept.file.close()
    assert owners(path) == ["b", "c"]


def test_where_no_thread_can_be_had_nothing_is_raised_and_close_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    path = tmp_path / "memory"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        kept = filled(path)
        assert caplog.text.count("can't start new thread") == 1
        assert not path.exists()
    kept.file.close()
    assert owners(path) == ["a", "b"]
