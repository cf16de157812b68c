"""``dflash-rag doctor``: what is well, what is wrong, and how to mend it."""

import json
import socket

from app import doctor
from app.doctor import Check
from app.settings import Settings
from dflash_engine import hub
from dflash_engine.fit import Machine


def checks(done) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(done.stdout)}


def test_a_healthy_installation_has_no_problem(installation):
    done = installation.run("doctor", "--json")
    found = checks(done)
    problems = {name: check["problem"] for name, check in found.items() if check["problem"]}
    assert problems.keys() <= {"memory", "disk", "fit"}  # of the machine that runs the tests
    assert done.returncode == (1 if problems else 0)
    assert set(found) >= {"python", "BLAS", "versions", "target", "embeddings", "port", "index"}
    assert "GFLOP/s" in found["BLAS"]["finding"]
    assert "4 files, 47 passages" in found["index"]["finding"]
    assert "torch 2." in found["versions"]["finding"]
    assert "smollm2-135m-dflash" in found["draft"]["finding"]
    assert found["fit"]["problem"] or "a context of 8192 tokens" in found["fit"]["finding"]


def test_problems_are_told_with_what_to_do(installation, here):
    (installation.home / "library.sqlite3").write_bytes(b"\x07" * 5000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = here(installation, "doctor", port=port, target_model="hf:some/model")
    assert done.returncode == 1
    said = "".join(done.stdout.split())  # lines are cut to the width of the terminal
    for problem in (
        "target: the weights of hf:some/model are not in",
        "'dflash-rag models pull hf:some/model'",
        f"port: cannot listen on 127.0.0.1 port {port}",
        f"index: {installation.home}/library.sqlite3 cannot be used",
    ):
        assert problem.replace(" ", "") in said


def settings_of(installation, **others):
    return Settings(
        home=installation.home, data=installation.data, models=installation.models, **others
    )


def test_the_servers_own_port_is_no_problem(server, shop):
    port = int(server.url.rsplit(":", 1)[1])
    settings = settings_of(shop, port=port)
    assert doctor._port(settings).problem == ""
    assert str(server.process.pid) in doctor._owner(settings).finding
    assert doctor._index(settings) == Check("index", "in use; ask its owner's /health")


def test_a_document_that_failed_is_a_problem(installation, here):
    (installation.data / "bad.pdf").write_bytes(b"no")
    assert here(installation, "ingest").returncode == 1
    assert "bad.pdf" in doctor._index(settings_of(installation)).problem


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(tmp_path):
    (tmp_path / "file").write_text("")
    settings = Settings(home=tmp_path / "file" / "home", models=tmp_path)

    def broken(settings: Settings) -> Check:
        raise PermissionError(13, "Permission denied", str(settings.home))

    assert "Permission denied" in doctor._try("home", broken, settings).problem


def test_an_address_of_ip_version_6_is_looked_at_too(installation):
    check = doctor._port(settings_of(installation, host="::1", port=0))
    assert "family" not in check.problem


QWEN, DRAFT = "hf:mlx-community/Qwen3-4B-4bit", "hf:z-lab/Qwen3-4B-DFlash-b16"


def test_the_draft_in_use_is_told_and_the_one_that_could_be(tmp_path):
    def finding(**settings):
        check = doctor._draft(Settings(models=tmp_path, target_model=QWEN, **settings))
        return check.finding, check.problem

    assert finding() == (f"none here; {DRAFT} is registered: 'dflash-rag models pull'", "")
    assert finding(draft_model="none") == ("none; drafter auto", "")
    assert finding(drafter="lookup") == ("none; drafter lookup", "")
    assert "hf:a/b are not in" in finding(draft_model="hf:a/b")[1]
    folder = tmp_path / hub._slug(DRAFT)
    folder.mkdir()
    (folder / hub.SOURCE_FILE).write_text(f'{{"source": "{DRAFT}", "layout": {hub._LAYOUT}}}')
    assert finding() == (f"{DRAFT} in {folder}", "")


def test_models_that_do_not_fit_are_a_problem(models, monkeypatch):
    settings = Settings(models=models, context=8192)
    assert doctor._fit(settings).problem == ""
    assert "a context of 8192 tokens" in doctor._fit(settings).finding
    small = Machine(total=2**30, limit=2**29)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: small))
    assert "smollm2" in doctor._fit(settings).problem
    assert "this machine has 512 MiB" in doctor._fit(settings).problem
    missing = doctor._fit(Settings(models=models, target_model=QWEN))
    assert missing == Check("fit", "not known while a model is missing")
