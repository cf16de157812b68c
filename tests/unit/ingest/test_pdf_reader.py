"""PDF: pages, titles, rows, wrapped lines, and every way in which a PDF can fail."""

import io
from contextlib import suppress

import pytest
from PIL import Image
from reportlab.lib.pagesizes import A4
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.lib.utils import ImageReader
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.cidfonts import UnicodeCIDFont
from reportlab.pdfgen import canvas
from reportlab.platypus import PageBreak, Paragraph, SimpleDocTemplate, Table

from ingest.errors import BrokenFile, EmptyFile, EncryptedFile, ImageOnlyFile, UnreadableFile
from ingest.readers import read

STYLES = getSampleStyleSheet()
SENTENCE = "We ship every weekday before noon and you can follow your parcel on its way. "


def build(*parts):
    out = io.BytesIO()
    SimpleDocTemplate(out, pagesize=A4).build(list(parts))
    return out.getvalue()


def drawn(*pages, **options):
    """Each page is a text, or None for a picture of text."""
    out = io.BytesIO()
    page_maker = canvas.Canvas(out, **options)
    for text in pages:
        if text is None:
            page_maker.drawImage(ImageReader(Image.new("RGB", (80, 40), "grey")), 72, 600)
        else:
            page_maker.drawString(72, 700, text)
        page_maker.showPage()
    page_maker.save()
    return out.getvalue()


def blocks(data):
    return read("a.pdf", data).blocks


def test_paragraphs_have_their_page_and_titles_above_them():
    data = build(
        Paragraph("Acme Shop", STYLES["Title"]),
        Paragraph("Shipping", STYLES["Heading2"]),
        Paragraph(SENTENCE * 5, STYLES["Normal"]),
        PageBreak(),
        Paragraph("<b>Returns</b>", STYLES["Normal"]),
        Paragraph("Bring it back within 30 days.", STYLES["Normal"]),
    )
    assert [(b.text, b.page, b.heading) for b in blocks(data)] == [
        ("Acme Shop", 1, "Acme Shop"),
        ("Shipping", 1, "Acme Shop > Shipping"),
        ((SENTENCE * 5).strip(), 1, "Acme Shop > Shipping"),
        ("Returns", 2, "Acme Shop > Shipping > Returns"),
        ("Bring it back within 30 days.", 2, "Acme Shop > Shipping > Returns"),
    ]


def test_a_row_of_a_table_is_one_line():
    rows = [["Item", "Price"], ["Oolong, high mountain", "NT$1,200"], ["Mug", "NT$30"]]
    text = "\n".join(b.text for b in blocks(build(Table(rows, colWidths=[240, 80]))))
    assert text.split("\n") == ["Item Price", "Oolong, high mountain NT$1,200", "Mug NT$30"]


def test_chinese_lines_join_without_spaces():
    pdfmetrics.registerFont(UnicodeCIDFont("MSung-Light"))
    style = STYLES["Normal"].clone("chinese", fontName="MSung-Light", wordWrap="CJK")
    text = "退貨政策：商品到貨七日內可申請退貨，請保持商品完整。" * 6
    assert [b.text for b in blocks(build(Paragraph(text, style)))] == [text]


def test_a_footer_on_every_page_is_kept_once():
    out = io.BytesIO()
    page_maker = canvas.Canvas(out)
    for page in range(1, 6):
        page_maker.drawString(72, 700, f"Chapter {'ABCDE'[page - 1]} is about tea.")
        page_maker.drawString(72, 660, f"It has a second line, {'vwxyz'[page - 1]}.")
        page_maker.drawString(72, 40, f"Acme Ltd, page {page} of 5")
        page_maker.showPage()
    page_maker.save()
    text = "\n".join(b.text for b in blocks(out.getvalue()))
    assert text.count("Acme Ltd") == 1
    assert all(f"Chapter {letter}" in text for letter in "ABCDE")


def test_a_pdf_with_a_password_says_so():
    with pytest.raises(EncryptedFile, match="password"):
        read("a.pdf", drawn("secret", encrypt=StandardEncryption("user", ownerPassword="owner")))


def test_a_pdf_that_is_only_protected_from_changes_is_read():
    data = drawn("open to read", encrypt=StandardEncryption("", ownerPassword="owner"))
    assert blocks(data)[0].text == "open to read"


def test_a_scanned_pdf_is_named_as_pictures():
    with pytest.raises(ImageOnlyFile, match="OCR"):
        read("a.pdf", drawn(None, None))


def test_a_picture_among_pages_is_a_warning():
    document = read("a.pdf", drawn("first", None, "third"))
    assert [b.page for b in document.blocks] == [1, 3]
    assert document.pages == 3
    assert "page 2" in document.warnings[0]


def test_an_empty_file_is_named_empty():
    with pytest.raises(EmptyFile):
        read("a.pdf", b"")


@pytest.mark.parametrize("data", [b"garbage", b"%PDF-1.7\n" + bytes(range(256)) * 20])
def test_a_broken_pdf_is_named_broken(data):
    with pytest.raises(BrokenFile):
        read("a.pdf", data)


def test_a_pdf_cut_off_anywhere_is_read_or_named():
    data = build(Paragraph(SENTENCE * 5, STYLES["Normal"]))
    for end in range(1, len(data), 97):
        with suppress(UnreadableFile):
            assert blocks(data[:end])
