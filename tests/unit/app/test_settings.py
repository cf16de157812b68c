"""Settings: where they come from, which wins, and what is said of wrong ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import SettingsError
from app.settings import FILE, Settings, load


@pytest.fixture(autouse=True)
def nothing_set(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith("DFLASH_RAG_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(text: str) -> None:
    Path(FILE).write_text(text, encoding="utf-8")


def test_flags_win_over_the_environment_and_that_over_the_file(monkeypatch):
    write('port = 1\ntop_k = 2\nname = "燈雀"\n')
    assert (load().port, load().top_k, load().name) == (1, 2, "燈雀")
    monkeypatch.setenv("DFLASH_RAG_PORT", "11")
    monkeypatch.setenv("DFLASH_RAG_TOP_K", "3")
    assert (load().port, load().top_k, load().name) == (11, 3, "燈雀")
    assert (load(port=111).port, load(port=111).top_k) == (111, 3)


def test_a_flag_that_was_not_given_and_an_empty_variable_change_nothing(monkeypatch):
    write("port = 1\n")
    monkeypatch.setenv("DFLASH_RAG_PORT", "")
    assert load(port=None, home=None).port == 1
    assert load().home == Path("var")


def test_weights_lie_in_the_state_folder_unless_set(monkeypatch):
    assert load(home=Path("elsewhere")).models_folder == Path("elsewhere/models")
    monkeypatch.setenv("DFLASH_RAG_MODELS", "weights")
    assert load(home=Path("elsewhere")).models_folder == Path("weights")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("portt = 8080", "portt"),
        ('port = "many"', "port"),
        ("port = 65536", "port"),
        ("port = -1", "port"),
        ("top_k = 0", "top_k"),
        ("temperature = 2.5", "temperature"),
        ("temperature = nan", "temperature"),
        ('drafter = "magic"', "drafter"),
        ("home = 5", "home"),
        ("max_waiting = 0", "max_waiting"),
        ("kv_bits = 3", "kv_bits"),
        ("draft_bits = 16", "draft_bits"),
        ('draft_bits = "many"', "draft_bits"),
        ("context = 100", "context"),
        ('strict = "perhaps"', "strict"),
        ("[server]\nport = 1", "server"),
        ("port = ", FILE),
        ("port = 1\nport = 2", FILE),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(text, named):
    write(text)
    with pytest.raises(SettingsError) as error:
        load()
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_utf8_is_named():
    Path(FILE).write_bytes('name = "caf\xe9"'.encode("latin-1"))
    with pytest.raises(SettingsError, match=FILE):
        load()


def test_all_wrong_settings_are_told_at_once(monkeypatch):
    write("top_k = 99\nportt = 1")
    monkeypatch.setenv("DFLASH_RAG_PORT", "none")
    with pytest.raises(SettingsError, match=r"(?=.*top_k)(?=.*portt)(?=.*port:)"):
        load()


def test_every_setting_says_what_it_is_for():
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("text", "arguments", "named"),
    [
        ("portt = 8080", ["models", "list"], "portt"),
        ("port = ", ["models", "list"], FILE),
        ("", ["serve", "--port", "65536"], "port"),
    ],
)
def test_the_command_line_tells_a_wrong_setting_without_a_traceback(text, arguments, named):
    write(text)
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("dflash-rag: ")
    assert named in done.stderr


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_come_from_the_file_and_the_environment(monkeypatch, bits):
    assert (load().kv_bits, load().draft_bits) == (None, None)
    write(f"kv_bits = {bits}\n")
    monkeypatch.setenv("DFLASH_RAG_DRAFT_BITS", str(bits))
    assert (load().kv_bits, load().draft_bits) == (bits, bits)


QWEN = "hf:mlx-community/Qwen3-4B-4bit"
DRAFT = "hf:z-lab/Qwen3-4B-DFlash-b16"


@pytest.mark.parametrize(
    ("settings", "draft"),
    [
        ({}, "smollm2-135m-dflash"),
        ({"target_model": QWEN}, DRAFT),
        ({"target_model": QWEN, "drafter": "block"}, DRAFT),
        ({"target_model": QWEN, "drafter": "lookup"}, None),
        ({"target_model": QWEN, "drafter": "none"}, None),
        ({"target_model": QWEN, "draft_model": "none"}, None),
        ({"target_model": QWEN, "draft_model": "hf:a/b"}, "hf:a/b"),
        ({"target_model": "hf:mlx-community/Qwen3-4B-Instruct-2507-4bit"}, None),
        ({"target_model": "models/Qwen3-4B-4bit"}, None),  # a folder: nothing to pull for it
        ({"draft_model": "hf:a/b"}, "hf:a/b"),
    ],
)
def test_the_models_needed_are_those_named_and_the_draft_that_is_registered(settings, draft):
    loaded = load(**settings)
    assert loaded.draft_name == draft
    names = [loaded.target_model, draft, "all-minilm-l6-v2"]
    assert loaded.model_names == [name for name in names if name]
