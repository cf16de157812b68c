"""Models of the Hugging Face hub, with its client's two calls answered here: no hub is reached."""

import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from dflash_engine import hub
from dflash_engine.errors import PullError


class Repository:
    """What the hub would answer for one repository."""

    def __init__(self, *files: str) -> None:
        self.files = files
        self.broken = False

    def info(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            sha="abc123", siblings=[SimpleNamespace(rfilename=file) for file in self.files]
        )

    def snapshot(self, name: str, *, revision: str, local_dir: Path, **patterns: list[str]) -> None:
        for file in self.files:
            kept = any(fnmatch.fnmatch(file, p) for p in patterns["allow_patterns"])
            if kept and not any(fnmatch.fnmatch(file, p) for p in patterns["ignore_patterns"]):
                path = local_dir / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{file} at {revision}")
            if self.broken:
                raise ConnectionError("the line went dead")


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Any:
    def serve(*files: str) -> Repository:
        served = Repository(*files)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", served.info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", served.snapshot)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        return served

    return serve


def pulled(models: Path) -> set[str]:
    folder = hub.pull("hf:org/model", models)
    assert folder == hub.resolve("hf:org/model", models)
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_weights_config_and_tokenizer_are_taken_and_the_rest_left(tmp_path, repository):
    repository(
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "README.md",
        "tokenizer.json",
        "1_Pooling/config.json",
        "train.py",
        "onnx/config.json",
    )
    assert pulled(tmp_path) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "1_Pooling/config.json",
        hub.SOURCE_FILE,
    }


def test_where_there_are_no_safetensors_the_torch_file_is_taken(tmp_path, repository):
    repository("config.json", "pytorch_model.bin", "colbert_linear.pt")
    assert pulled(tmp_path) == {"config.json", "pytorch_model.bin", hub.SOURCE_FILE}


def test_a_repository_without_weights_is_refused(tmp_path, repository):
    repository("README.md", "config.json")
    with pytest.raises(PullError, match="no weights"):
        hub.pull("hf:org/model", tmp_path)
    assert not hub.is_pulled("hf:org/model", tmp_path)


def test_a_download_that_breaks_off_is_told_and_goes_on_where_it_stopped(tmp_path, repository):
    served = repository("config.json", "model.safetensors")
    served.broken = True
    with pytest.raises(PullError, match=r"the line went dead.*smollm2-135m"):
        hub.pull("hf:org/model", tmp_path)
    assert not hub.is_pulled("hf:org/model", tmp_path)
    assert [p.name for p in tmp_path.glob(".pulling-*/*")] == ["config.json"]
    served.broken = False
    assert pulled(tmp_path) == {"config.json", "model.safetensors", hub.SOURCE_FILE}
