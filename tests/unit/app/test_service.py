"""What the settings become when the engine is opened."""

import pytest

from app import service
from app.settings import Settings


@pytest.fixture
def opened(monkeypatch):
    """The arguments that the engine was last opened with."""
    arguments = {}

    def engine(target_model, draft_model, **options):
        arguments.update(options, target_model=target_model, draft_model=draft_model)

    monkeypatch.setattr(service, "DFlash", engine)
    return arguments


def test_the_engine_gets_every_setting_that_is_its(opened, tmp_path):
    settings = {
        "target_model": "hf:a/b",
        "drafter": "block",
        "precision": "native",
        "draft_bits": 4,
        "kv_bits": 8,
        "context": 4096,
        "strict": True,
        "max_waiting": 3,
        "memory_tokens": 500,
    }
    own = {"models": tmp_path, "home": tmp_path / "home", "prefix_mb": 3, "prefix_disk_mb": 2}
    service.open_engine(Settings(**settings, **own, thinking=True))
    assert opened == settings | {
        "store": tmp_path / "home" / "engine",
        "prefix_bytes": 3 * 2**20,
        "prefix_disk_bytes": 2 * 2**20,
        "draft_model": "auto",
        "models": tmp_path,
        "template_args": {"enable_thinking": True},
    }


@pytest.mark.parametrize(
    ("setting", "argument"), [("auto", "auto"), ("none", None), ("hf:a/b", "hf:a/b")]
)
def test_no_draft_is_none(opened, setting, argument):
    service.open_engine(Settings(draft_model=setting))
    assert opened["draft_model"] == argument
