"""``dflash-rag serve`` as a process: starting, dying, being told to stop."""

import json
import signal
import socket
import sqlite3

import pytest
from integration.app.running import Server

from app import serving
from app.errors import ServerFailedError
from ingest import Home

ENDLESS = {
    "question": "How late can I come by on a Friday evening?",
    "top_k": 1,
    "max_tokens": 4000,
    "temperature": 2,
}


def one_line(done) -> str:
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("dflash-rag: ")
    return done.stderr


def test_it_is_not_ready_before_it_is_loaded_survives_being_killed_and_stops_when_told(
    installation,
):
    env = installation.env()
    with Server(installation.home, env) as server:
        loading = server.client.get("/health")
        assert loading.status_code == 503
        assert loading.json()["status"] == "loading"
        assert int(loading.headers["retry-after"]) >= 1
        refused = server.client.post("/ask", json={"question": "When?"})
        assert refused.status_code == 503
        assert "loaded" in refused.json()["error"]["message"]
        assert server.client.get("/").status_code == 200  # the page says that it is loading
        server.wait_until_ready()
        assert server.ask(ENDLESS["question"])["found"]

        message = one_line(installation.run("serve"))
        assert f"process {server.process.pid}" in message
        assert server.url in message

        server.process.kill()
        server.process.wait()
    assert Home(installation.home).owner() is None

    with Server(installation.home, env) as server:
        server.wait_until_ready()
        assert server.client.get("/health").json()["passages"] == 47
        with server.client.stream("POST", "/ask/stream", json=ENDLESS) as response:
            lines = response.iter_lines()
            next(line for line in lines if line == "event: token")
            server.process.send_signal(signal.SIGTERM)
            assert "event: error" in list(lines)  # told, not cut off
        assert server.process.wait(12) == 0
        assert "Traceback" not in server.log.read_text()
        assert not (installation.home / "owner.json").exists()
    assert Home(installation.home).owner() is None
    with Home(installation.home).lock():
        pass


def test_a_port_that_is_taken_is_told_and_the_home_is_free_again(installation, here):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = one_line(here(installation, "serve", port=port))
    assert str(port) in message
    assert "--port" in message
    assert Home(installation.home).owner() is None


@pytest.mark.parametrize("host", ["not.a.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_this_machines_is_told(installation, here, host):
    assert host in one_line(here(installation, "serve", host=host))


def test_a_server_listens_before_it_is_announced():
    with serving.listen("127.0.0.1", 0) as listening:
        # Nobody accepts yet, and still a client can connect; nobody else can have the port.
        with socket.create_connection(listening.getsockname(), timeout=5):
            pass
        with pytest.raises(ServerFailedError, match="in use"):
            serving.listen(*listening.getsockname())


def test_without_models_it_ends_and_says_which_command_fetches_them(installation, here, tmp_path):
    done = installation.run("serve", models=tmp_path / "none")
    assert done.returncode == 3
    said = done.stderr.splitlines()[-1]
    assert said.startswith("dflash-rag: ")
    assert "dflash-rag models pull" in said
    assert "Traceback" not in done.stderr
    assert Home(installation.home).owner() is None
    missing = installation.copy(tmp_path / "other")
    assert "dflash-rag models pull" in one_line(here(missing, "ingest", models=tmp_path / "none"))


def test_an_index_of_another_embedding_model_ends_it_so_that_it_can_be_rebuilt(installation):
    library = sqlite3.connect(installation.home / "library.sqlite3")
    with library:
        stored = library.execute("select value from facts where name = 'fingerprint'").fetchone()[0]
        other = json.dumps(json.loads(stored) | {"model": "another"})
        library.execute("update facts set value = ? where name = 'fingerprint'", [other])
    library.close()
    done = installation.run("serve")
    assert done.returncode == 3
    assert "ingest --rebuild" in done.stderr.splitlines()[-1]
    assert Home(installation.home).owner() is None
