"""Readers of text and Markdown: encodings, titles, lines."""

import time

import pytest

from ingest.errors import EmptyFile, UndecodableFile, UnsupportedFile
from ingest.readers import read, supported
from ingest.readers.wrapping import join

CHINESE = "退貨政策：商品到貨七日內可申請退貨，請保持商品完整。運費由本店負擔。"
SIMPLIFIED = "退货政策：商品到货七日内可申请退货，请保持商品完整。运费由本店负担。"


def texts(name, data):
    return [block.text for block in read(name, data).blocks]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (CHINESE, "utf-8"),
        (CHINESE, "utf-8-sig"),
        (CHINESE, "utf-16"),
        (CHINESE, "cp950"),
        ("免運", "cp950"),
        ("Price list 價目表\nTea 茶 100\nMug 杯 30", "cp950"),
        ("香港嘅茶餐廳喺邊", "big5hkscs"),
        (SIMPLIFIED, "gb18030"),
        ("免费送货", "gb18030"),
        ("Café crème à emporter, naïve façade", "cp1252"),
        ("Änderung der Öffnungszeiten für Kunden", "cp1252"),
    ],
)
def test_text_is_read_in_the_encoding_it_was_written_in(text, encoding):
    assert "\n".join(texts("a.txt", text.encode(encoding))) == text


@pytest.mark.parametrize("data", [b"MZ\x00\x01\x02", b"\xff\xfe\x00", b"\xff\x81\xff\x8d\xff"])
def test_bytes_that_are_no_text_are_refused(data):
    with pytest.raises(UndecodableFile):
        read("a.txt", data)


@pytest.mark.parametrize("data", [b"", b"  \n\n ", "\ufeff".encode()])
def test_a_file_without_words_is_called_empty(data):
    with pytest.raises(EmptyFile):
        read("a.txt", data)


def test_an_unknown_kind_of_file_is_refused_by_name():
    with pytest.raises(UnsupportedFile, match=r"\.exe"):
        read("a.exe", b"x")
    assert supported("A.PDF")
    assert not supported("pdf")


def test_lines_filled_to_one_width_become_a_paragraph_and_short_ones_stay():
    wrapped = (
        b"This paragraph was wrapped by an editor at some seventy columns, so its\n"
        b"lines belong together and are one sentence for whoever reads it, which\n"
        b"matters for quoting.\n\nTea 100\nMug 30\n"
    )
    paragraph, prices = texts("a.txt", wrapped)
    assert "\n" not in paragraph
    assert "so its lines belong" in paragraph
    assert prices == "Tea 100\nMug 30"


def test_markdown_titles_become_the_heading_path():
    document = read(
        "a.md",
        b"---\ntitle: x\n---\n"
        b"# Shop\n\n## Returns\nText one.\n\nHours\n-----\nNine.\n# Other\nEnd.",
    )
    assert [(b.text, b.heading) for b in document.blocks] == [
        ("Shop", "Shop"),
        ("Returns", "Shop > Returns"),
        ("Text one.", "Shop > Returns"),
        ("Hours", "Shop > Hours"),
        ("Nine.", "Shop > Hours"),
        ("Other", "Other"),
        ("End.", "Other"),
    ]
    assert document.pages == 0


def test_markdown_marks_go_and_tables_and_code_stay_lines():
    source = (
        "Some **bold**, *soft* and `code` in snake_case_name, 2 * 3 * 4\n"
        "and [a link](https://x.example/a).\n<!-- hidden -->\n\n"
        "| Item | Price |\n|:-----|------:|\n| Tea | 3.50 |\n\n```\n# no title\nx = 1\n```\n"
        "- one\n  more\n- two\n"
    )
    assert texts("a.md", source.encode()) == [
        "Some bold, soft and code in snake_case_name, 2 * 3 * 4 and a link (https://x.example/a).",
        "Item | Price\nTea | 3.50",
        "# no title\nx = 1",
        "- one more\n- two",
    ]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("> quoted\n> > twice", "quoted twice"),
        ("for 2 > 1 -> yes", "for 2 > 1 -> yes"),
        (
            "<b>Ask</b> <help@x.example> or <https://x.example>",
            "Ask help@x.example or https://x.example",
        ),
        ("**Use `--to=<place>`** and ``a ` *b*``", "Use --to=<place> and a ` *b*"),
        ("[A](https://x.example/A_(b)) ![i](i.png) [t](t.md)", "A (https://x.example/A_(b)) i t"),
        ("[![i](i.png)](https://x.example)", "i (https://x.example)"),
        ("one.<br/>Two.", "one. Two."),
        ("a `lonely tick and *star", "a `lonely tick and *star"),
        ("__a *b* c__ **d _e_ f**", "a b c d e f"),
    ],
)
def test_only_marks_go_from_markdown(source, text):
    assert texts("a.md", source.encode()) == [text]


def test_a_markdown_title_of_hundreds_of_characters_is_a_paragraph():
    document = read("a.md", b"# Shop\n# " + b"word " * 100 + b"\nText.")
    assert [block.heading for block in document.blocks] == ["Shop"] * 3
    assert [block.is_title for block in document.blocks] == [True, False, False]


@pytest.mark.parametrize("name", ["a.md", "a.txt"])
@pytest.mark.parametrize(
    "unit",
    [
        *("*a ", "**a ", "_a ", "__a ", "[", "![", "[a](", "[a](http://x", "[a]()(", "`", "`a``b "),
        *("<", "<a ", "<https://x ", "<!--", "> ", "- ", "1. ", "\\[", "*_`[<", "|", "|a", "-|"),
        *("a\n", "x" * 79 + "\n", "word, word-\n", "\n", "- a\n\n", "|x|y|\n", "# h\n", "---\n"),
        *("a", " ", "J. ", "a\u0301\u0323\u0301"[1:]),
    ],
)
def test_no_text_takes_a_reader_long(name, unit):
    data = ("a" + unit * (200_000 // len(unit)) + "x|-").encode()
    began = time.process_time()
    read(name, data)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("line", "following", "words", "joined"),
    [
        ("the infor-", "mation desk", set(), "the information desk"),
        ("a well-", "known shop", {"well-known"}, "a well-known shop"),
        ("申請", "退貨", set(), "申請退貨"),
        ("반품", "정책", set(), "반품 정책"),
        ("one", "two", set(), "one two"),
    ],
)
def test_wrapped_lines_join_as_their_script_wants(line, following, words, joined):
    assert join(line, following, words) == joined
