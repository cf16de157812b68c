"""While a server runs, it is the one that ingests; and it goes on answering."""

import contextlib
import json
import sqlite3
import threading
from pathlib import Path

import httpx
import pytest
from integration.app.running import events

from app import ingesting
from app.errors import ServerFailedError
from app.settings import Settings
from dflash_engine.drafters.memory import Memory
from ingest import HomeLocked

QUESTION = "How much is the violet lamp with the brass foot?"


@pytest.fixture
def settings(shop, server):
    return Settings(home=shop.home, data=shop.data, models=shop.models)


def test_the_command_hands_its_work_to_the_server_and_the_document_is_answered_from_at_once(
    shop, server, settings
):
    document = shop.data / "lamps.txt"
    document.write_text("The violet lamp with the brass foot costs 77 dollars.")
    try:
        assert not server.ask(QUESTION)["found"]
        done = shop.run("ingest", "--json", document)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["files"] == 1
        assert server.log.read_text().count("POST /documents/ingest") >= 1
        assert server.home.owner().pid == server.process.pid
        found = server.ask(QUESTION)
        assert found["citations"][0]["file"] == "lamps.txt"
        assert found["citations"][0]["page"] is None
        assert found["quotes"][0]["sentence"] == document.read_text()
        assert server.client.get("/health").json()["documents"] == 5
        assert server.ask(QUESTION)["engine"]["reused"] > 50
        assert server.ask("How late can I come by on a Friday evening?")["found"]
    finally:
        document.unlink()
        removed = ingesting.ingest(settings, [shop.data])
    # What was answered from it has left the disk; the rest has not.
    remembered = Memory(shop.home / "engine" / "memory.bin", key=None).owners
    with contextlib.closing(sqlite3.connect(server.home.library)) as library:
        assert remembered <= {id for (id,) in library.execute("SELECT id FROM passages")}
    assert remembered
    assert (removed["removed"], removed["unchanged"]) == (1, 4)
    assert not server.ask(QUESTION)["found"]


def test_a_file_that_fails_is_told_and_progress_is_shown(shop, settings):
    (shop.data / "bad.txt").write_bytes(b"\x00\x01")
    seen = []
    try:
        summary = ingesting.ingest(settings, [shop.data], on_event=seen.append)
    finally:
        (shop.data / "bad.txt").unlink()
        ingesting.ingest(settings, [shop.data])
    assert [failed["file"] for failed in summary["failed"]] == ["bad.txt"]
    kinds = [event.kind for event in seen]
    assert kinds[0] == "found"
    assert kinds.count("unchanged") == 4
    assert kinds.count("failed") == 1


def test_a_relative_path_means_the_callers_folder(shop, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lamp.txt").write_bytes(b"\x00\x01")
    summary = ingesting.ingest(settings, [Path("lamp.txt")])
    assert summary["failed"][0]["file"] == str(tmp_path / "lamp.txt")
    Path("lamp.txt").unlink()
    assert ingesting.ingest(settings, [Path("lamp.txt")])["removed"] == 1


class Enough(Exception):  # noqa: N818 - the test has seen what it wanted
    pass


def test_questions_are_answered_while_an_ingest_runs(shop, server, settings):
    big = shop.data / "big.txt"
    big.write_text("\n\n".join(f"Paragraph {n}: " + f"word{n} " * 60 for n in range(250)))
    seen, embedding, enough = [], threading.Event(), threading.Event()

    def on_event(event):
        seen.append(event)
        if event.kind == "embedding":
            embedding.set()
        if enough.is_set():
            raise Enough

    def work():
        with contextlib.suppress(Enough):
            ingesting.ingest(settings, [big], on_event=on_event)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert embedding.wait(30)
        answer = server.ask("How late can I come by on a Friday evening?", max_tokens=1)
        last = seen[-1]
    finally:
        enough.set()
        thread.join(60)
        big.unlink()
        ingesting.ingest(settings, [big])
    assert answer["citations"][0]["file"] == "samples/hours-and-returns.pdf"
    assert last.kind == "embedding"
    assert last.passages < last.of_passages
    assert server.client.get("/health").json()["passages"] == 47


def test_two_commands_at_once_are_both_served(shop, settings):
    summaries = []
    threads = [
        threading.Thread(target=lambda: summaries.append(ingesting.ingest(settings, [shop.data])))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [summary["unchanged"] for summary in summaries] == [4, 4]


def test_a_command_that_is_broken_off_stops_the_ingest(shop, server, settings):
    many = shop.data / "many"
    many.mkdir()
    for n in range(40):
        (many / f"{n:02}.txt").write_text(f"File {n}. " + f"Filling {n} of it. " * 300)
    owner = server.home.owner()
    headers = {"Authorization": f"Bearer {owner.token}"}
    with server.client.stream(
        "POST", "/documents/ingest", json={"paths": [str(many)]}, headers=headers
    ) as response:
        for line in response.iter_lines():
            if '"done"' in line:
                break
    for path in many.iterdir():
        path.unlink()
    summary = ingesting.ingest(settings, [shop.data])
    assert 1 <= summary["removed"] < 20
    assert summary["failed"] == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic Og=="},
        {"Authorization": "Bearer \xe9".encode("latin-1")},
    ],
)
def test_without_the_owners_token_nothing_is_ingested(shop, server, headers):
    (shop.data / "planted.txt").write_text("Planted.")
    try:
        response = server.client.post(
            "/documents/ingest", json={"paths": [str(shop.data)]}, headers=headers
        )
        assert response.status_code == 401
        assert "owner" in response.json()["error"]["message"]
        assert server.client.get("/health").json()["documents"] == 4
    finally:
        (shop.data / "planted.txt").unlink()


def test_the_token_is_for_the_owner_of_the_home_alone(server):
    assert server.home.path.stat().st_mode & 0o777 == 0o700
    assert (server.home.path / "owner.json").stat().st_mode & 0o777 == 0o600
    assert server.home.owner().token not in server.log.read_text()


@pytest.mark.parametrize("body", [{}, {"paths": []}, {"paths": "data"}, {"paths": [5]}])
def test_a_wrong_request_of_the_owner_is_refused(server, body):
    headers = {"Authorization": f"Bearer {server.home.owner().token}"}
    response = server.client.post("/documents/ingest", json=body, headers=headers)
    assert response.status_code == 422
    assert "paths" in response.json()["error"]["message"]


def test_a_path_with_a_nul_ends_that_request_and_nothing_else(server):
    headers = {"Authorization": f"Bearer {server.home.owner().token}"}
    with server.client.stream(
        "POST", "/documents/ingest", json={"paths": ["/tmp/\x00"]}, headers=headers
    ) as response:
        got = events(response)
    assert [name for _, name, _ in got][-1] in ("summary", "error")
    assert server.client.get("/health").status_code == 200


def test_a_server_that_does_not_answer_is_told(tmp_path, settings):
    class Gone:
        pid, url, token = 1, "http://127.0.0.1:9", "token"

    with pytest.raises(ServerFailedError, match=r"process 1.*run this again"):
        ingesting._hand_over(Gone(), [tmp_path], False, lambda event: None)


def test_another_process_cannot_take_the_home(server, settings):
    from app.service import Service

    with pytest.raises(HomeLocked, match=str(server.process.pid)):
        Service(settings, type(server.home)(server.home.path))


def test_the_server_is_asked_without_a_proxy(settings, shop, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(httpx.ConnectError):
        httpx.get("http://localhost.example")
    assert ingesting.ingest(settings, [shop.data])["unchanged"] == 4
