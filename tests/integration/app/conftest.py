"""The samples, ingested once by the real command line, and one server over a copy of that home."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from integration.app.running import Server, command, environment

from app import cli
from dflash_engine import DFlash

SAMPLES = Path(__file__).parents[3] / "data" / "samples"


@dataclass(frozen=True)
class Installation:
    """A home in which the samples are, and what ingesting them said."""

    home: Path
    data: Path
    models: Path
    ingest: CompletedProcess[str]

    def copy(self, folder: Path) -> "Installation":
        """The same in another folder, with a data folder of its own."""
        home, data = folder / "home", folder / "data"
        shutil.copytree(self.home, home)
        shutil.copytree(self.data, data)
        return Installation(home, data, self.models, self.ingest)

    def env(self, **settings: object) -> dict[str, str]:
        """The environment for its commands."""
        own = {"models": self.models, "data": self.data, "home": self.home}
        return environment(**own | settings)

    def run(self, *arguments: str | Path, **settings: object) -> CompletedProcess[str]:
        """Run ``dflash-rag`` on it."""
        return command(*arguments, env=self.env(**settings), cwd=self.home.parent)


@pytest.fixture(scope="session")
def ingested(models, tmp_path_factory):
    """The samples in a home that no process uses: copy it."""
    folder = tmp_path_factory.mktemp("ingested")
    data, home = folder / "data", folder / "home"
    shutil.copytree(SAMPLES, data / "samples")
    env = environment(models=models, data=data)
    done = command("ingest", "--home", home, "--json", env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    with DFlash("smollm2-135m", models=models, store=home / "engine"):
        pass  # measures what forwards cost, which servers on copies of the home need not do again
    return Installation(home, data, models, done)


@pytest.fixture
def installation(ingested, tmp_path):
    """A copy of the ingested home."""
    return ingested.copy(tmp_path)


@pytest.fixture
def here(monkeypatch, capsys):
    """Run ``dflash-rag`` on an installation in this process, which has the imports behind it."""

    def run(installation: Installation, *arguments: str | Path, **settings: object):
        with monkeypatch.context() as patch:
            for name in set(os.environ) - set(env := installation.env(**settings)):
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            patch.setattr("sys.argv", ["dflash-rag", *map(str, arguments)])
            patch.chdir(installation.home.parent)
            capsys.readouterr()
            with pytest.raises(SystemExit) as end:
                cli.main()
        return CompletedProcess(arguments, end.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def shop(ingested, tmp_path_factory):
    """The installation that ``server`` serves."""
    return ingested.copy(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="session")
def server(shop):
    """One running server for all tests; at most eight questions may wait."""
    with Server(shop.home, shop.env(max_waiting=8)) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="session")
def questions():
    """The demo's questions with the pages that answer them."""
    return json.loads((SAMPLES / "questions.json").read_text(encoding="utf-8"))
