"""Text: one normal form, sentences of any script, terms for the index."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.text import index_terms, normalise, query_terms, sentences


def split(text):
    return [text[start:end] for start, end in sentences(text)]


@given(st.text())
def test_normalising_twice_changes_nothing_more(text):
    once = normalise(text)
    assert normalise(once) == once


def test_normalising_removes_what_cannot_be_seen_and_keeps_what_can():
    assert normalise("re\u00adfund\u200b\u202e\x07 caf\u0065\u0301\r\n\r\n\r\n\r\nx\u00a0y  z") == (
        "refund café\n\nx y z"
    )
    assert normalise("：①½Ａ") == "：①½Ａ"


@pytest.mark.parametrize("mark", ["\u0301\u0323", "\u0344", "\u0323"])
def test_marks_without_end_on_one_letter_are_cut_off(mark):
    began = time.process_time()
    once = normalise("e" + mark * 100_000 + "x")
    assert time.process_time() - began < 1
    assert normalise(once) == once
    assert len(once) <= 32
    assert once.endswith("x")


@given(st.text())
def test_sentences_hold_every_visible_character_once_in_order(text):
    spans = sentences(text)
    assert "".join("".join(text[a:b].split()) for a, b in spans) == "".join(text.split())
    assert all(a < b for a, b in spans)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))


@pytest.mark.parametrize(
    "whole",
    [
        "It costs NT$1,200.50 or 3.5 euro.",
        "Use a carrier, e.g. DHL, for parcels.",
        "Ask Mr. Lin or Dr. Wu about it.",
        "See https://shop.example/a.html?q=1.2 for more.",
        "Written by J. Smith at No. 5 Main St. in Taipei.",
        "1. Open the box",
        "Is it Yahoo! or not",
    ],
)
def test_dots_inside_a_sentence_do_not_end_it(whole):
    assert split(whole) == [whole]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        (
            "七日內可退貨。「請保持完整！」謝謝；再見",
            ["七日內可退貨。", "「請保持完整！」", "謝謝；", "再見"],
        ),
        ("可以嗎?可以。", ["可以嗎?", "可以。"]),
        ("Tea 3.50\nMug 2.00", ["Tea 3.50", "Mug 2.00"]),
    ],
)
def test_sentences_end_where_a_reader_would_say(text, parts):
    assert split(text) == parts


def test_questions_and_documents_meet_in_the_same_terms():
    assert set(index_terms("Refunds")) == set(index_terms("refund"))
    assert "1200.50" in index_terms("NT$1,200.50")
    assert "h100" in index_terms("the H-100")
    assert "h100" in index_terms("H100")
    assert index_terms("退貨政策") == ["退貨", "貨政", "政策"]
    assert index_terms("茶 tea") == ["茶", "tea"]
    assert index_terms("\u2fb7品") == index_terms("食品")  # a Kangxi radical from a PDF's font
    assert index_terms("ＡＢＣ１２") == ["abc12"]


def test_stop_words_leave_a_question_unless_nothing_else_is_in_it():
    assert query_terms("What is the price of the tea?") == ["price", "tea"]
    assert query_terms("what is it") == ["what", "is", "it"]
    assert query_terms("🙂 !?") == []


def test_chinese_stop_words_are_gone_before_characters_are_paired():
    assert query_terms("手沖壺可以保固多久？") == ["手沖", "沖壺", "保固"]
    assert query_terms("會員有什麼優惠") == ["會員", "員有", "優惠"]
    assert query_terms("是什麼") == ["是什", "什麼"]  # nothing else is left


@given(st.text())
def test_terms_hold_no_sign_that_the_index_would_split_at(text):
    assert all(term and not set(term) & set(" \t\n\"*'()-_:^+") for term in index_terms(text))


@pytest.mark.parametrize("run", [" ", "\t", "\n", ".", "\u00a0", '"', "1.", "好", "-"])
@pytest.mark.parametrize("work", [normalise, sentences, index_terms])
def test_a_long_run_of_one_character_takes_no_quadratic_time(run, work):
    began = time.monotonic()
    work(run * 200_000 + "x")
    assert time.monotonic() - began < 5  # quadratic: minutes
