"""The cutter: nothing lost, nothing twice, nothing too long, one page a passage."""

import re
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.passages import cut
from ingest.readers.document import Block, Document
from ingest.text import normalise


def count(text):
    """Tokens as a toy tokenizer sees them: words up to four letters, single other signs."""
    return len(re.findall(r"[a-zA-Z0-9]{1,4}|[^\sa-zA-Z0-9]", text))


prose = st.text(alphabet="ab AB .,!?。，！\n退貨政策茶1230$|-", max_size=400) | st.text(max_size=80)


@st.composite
def documents(draw):
    blocks, heading = [], ""
    for page in range(1, draw(st.integers(1, 3)) + 1):
        for _ in range(draw(st.integers(0, 5))):
            text = normalise(draw(prose))
            if not text.strip():
                continue
            title = draw(st.booleans()) and "\n" not in text and len(text) < 60
            heading = text if title else heading
            blocks.append(Block(text, page, heading, is_title=title))
    return Document(blocks, 3)


@settings(max_examples=300, deadline=None)
@given(documents(), st.integers(12, 60))
def test_passages_cover_each_page_exactly_once_within_the_limit(document, limit):
    cuts = cut(document, count, target=limit - 4, limit=limit)
    for page in document.page_blocks():
        text = document.page_text(page)
        mine = [found for found in cuts if found.page == page]
        assert "".join("".join(c.text.split()) for c in mine) == "".join(text.split())
        assert all(text[c.start : c.end] == c.text for c in mine)
        assert all(a.end <= b.start for a, b in pairwise(mine))
    assert all(c.tokens == count(c.searchable) <= limit for c in cuts)
    assert all(c.page == c.page_end for c in cuts)


def test_a_chinese_text_is_cut_at_its_full_stops():
    text = "商品到貨七日內可以申請退貨，請保持商品完整。" * 20
    cuts = cut(Document([Block(text)]), count, target=60, limit=80)
    assert len(cuts) > 3
    assert all(c.text.endswith("。") for c in cuts)


def test_rows_of_a_table_stay_whole():
    rows = [f"Tea number {n} | NT${n}00" for n in range(60)]
    cuts = cut(Document([Block("\n".join(rows))]), count, target=60, limit=80)
    assert [line for c in cuts for line in c.text.split("\n")] == rows


def test_one_word_without_end_is_divided_and_nothing_is_lost():
    word = "x" * 5000
    cuts = cut(Document([Block(word)]), count, target=60, limit=80)
    assert "".join(c.text for c in cuts) == word
    assert max(c.tokens for c in cuts) <= 80


def test_a_passage_keeps_to_one_heading_and_later_ones_are_told_it():
    document = Document(
        [
            Block("Shop", heading="Shop", is_title=True),
            Block("Returns", heading="Shop > Returns", is_title=True),
            Block("We take it back. " * 30, heading="Shop > Returns"),
            Block("Opening hours", heading="Shop > Opening hours", is_title=True),
            Block("Nine to five.", heading="Shop > Opening hours"),
        ]
    )
    cuts = cut(document, count, target=60, limit=80)
    assert cuts[0].text.startswith("Shop\n\nReturns\n\nWe take")
    assert cuts[1].searchable.startswith("Shop > Returns\nWe take")
    assert cuts[-1].text == "Opening hours\n\nNine to five."
    assert cuts[-1].searchable.startswith("Shop\nOpening hours")


def test_a_long_section_leaves_no_scrap_at_its_end():
    cuts = cut(Document([Block("Four words are here. " * 50)]), count, target=60, limit=80)
    assert min(c.tokens for c in cuts) > 40


def test_words_that_a_tokenizer_counts_as_one_unknown_are_bounded_by_their_length():
    word = "x" * 50_000
    cuts = cut(Document([Block(word)]), lambda text: 1, target=60, limit=80)
    assert "".join(c.text for c in cuts) == word
    assert max(len(c.text) for c in cuts) <= 16 * 80


@pytest.mark.parametrize(
    "document",
    [
        Document([Block("J. " * 100_000)]),
        Document([Block("x" * 5_000_000)]),
        Document([Block("x\n" * 100_000)]),
        Document([Block("x")] * 100_000),
        Document([Block("x", page) for page in range(20_000)]),
    ],
    ids=["initials", "one long word", "short lines", "short blocks", "short pages"],
)
def test_no_document_takes_the_cutter_long(document):
    began = time.process_time()
    cut(document, lambda text: len(text) // 4 + 1)
    assert time.process_time() - began < 5
