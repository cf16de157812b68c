"""Make the PDFs of `data/samples/` from the Markdown of `scripts/samples/`.

The documents of a shop that does not exist: every name, address and number in them is made up.
They are what `make demo` ingests and what the tests ask about, so each fact stands in one place
a language, and the same Markdown gives the same bytes.

    python scripts/make_samples.py            write the PDFs
    python scripts/make_samples.py --check    fail when a PDF is not what its Markdown gives

What the Markdown may hold: headings of two levels, paragraphs, lists, tables, quotes (drawn as a
box), `<!-- page -->` for a page break, `<!-- title: ... -->` and `<!-- lang: ... -->`, and
`![](drawing:grinder)`. Nothing is left to flow: text that overruns its page or a table cell that
would wrap is an error, so that a table row stays one line of text in the PDF.
"""

# mypy: disable-error-code="import-untyped, misc, no-untyped-call"

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import as_file, files
from io import BytesIO
from pathlib import Path

import pypdfium2 as pdfium
from fontTools import subset
from fontTools.ttLib import TTFont as FontFile
from fontTools.varLib import instancer
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from reportlab.lib.colors import Color, HexColor, white
from reportlab.lib.enums import TA_LEFT
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import (
    BaseDocTemplate,
    Flowable,
    Frame,
    PageBreak,
    PageTemplate,
    Paragraph,
    Spacer,
    Table,
)

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "samples"
OUTPUT = HERE.parent / "data" / "samples"

# One variable font for both languages (SIL OFL 1.1, from the package `justmytype-intl-cjk`).
FONT_PACKAGE = "justmytype_intl_cjk"
FONT_PATH = "fonts/ofl/notosanstc/NotoSansTC[wght].ttf"
WEIGHTS = {"Sample": 400, "Sample-Bold": 700, "Sample-Light": 300}

SHOP = {"en": "Lantern Finch Coffee Tools", "zh-Hant": "燈雀咖啡器材行"}

PAGE = (176 * mm, 250 * mm)  # B5
MARGIN = 17 * mm
WIDTH = PAGE[0] - 2 * MARGIN
TOP = 25 * mm
BOTTOM = 19 * mm

INK = HexColor("#1f2b30")
SOFT = HexColor("#66757b")
ACCENT = HexColor("#b0552a")
DEEP = HexColor("#1d4b4a")
TINT = HexColor("#f5efe5")
RULE = HexColor("#d9d0c1")


class SampleError(Exception):
    """A sample's Markdown cannot be set as written; the message names the file and the cause."""


@dataclass(frozen=True)
class Source:
    """One Markdown file: what it says about itself, and its parsed body."""

    path: Path
    title: str
    lang: str
    nodes: list[SyntaxTreeNode] = field(repr=False)

    @property
    def pages(self) -> int:
        """Pages the document has: one more than its page breaks."""
        return 1 + sum(_comment(node) == "page" for node in self.nodes)


def _comment(node: SyntaxTreeNode) -> str:
    """The text of an HTML comment, "" for any other node."""
    found = re.fullmatch(r"<!--\s*(.*?)\s*-->", node.content.strip()) if _is_html(node) else None
    return found[1] if found else ""


def _is_html(node: SyntaxTreeNode) -> bool:
    return node.type == "html_block"


def read_source(path: Path) -> Source:
    """Parse one Markdown file."""
    parser = MarkdownIt("commonmark").enable("table")
    nodes = SyntaxTreeNode(parser.parse(path.read_text(encoding="utf-8"))).children
    about: dict[str, str] = {}
    body = []
    for node in nodes:
        # Comments on neighbouring lines are one HTML block.
        lines = node.content.split("\n") if _is_html(node) else []
        pairs = [re.fullmatch(r"<!--\s*(title|lang):\s*(.*?)\s*-->", line) for line in lines]
        about.update({pair[1]: pair[2] for pair in pairs if pair})
        if not any(pairs):
            body.append(node)
    if not {"title", "lang"} <= set(about):
        raise SampleError(f"{path.name}: needs <!-- title: ... --> and <!-- lang: ... -->")
    return Source(path, about["title"], about["lang"], body)


def register_fonts(text: str) -> None:
    """Cut the variable font down to the characters of `text`, once a weight, and register them."""
    wanted = {ord(character) for character in text} | set(range(0x20, 0x7F)) | {0xB7}
    with as_file(files(FONT_PACKAGE).joinpath(FONT_PATH)) as path:
        whole = FontFile(path, recalcTimestamp=False)
    missing = wanted - set(whole.getBestCmap() or {}) - {0x0A}
    if missing:
        raise SampleError(f"the font has no {', '.join(map(chr, sorted(missing)))}")
    cutter = subset.Subsetter(subset.Options(layout_features=[], name_IDs=[1, 2, 4, 6]))
    cutter.populate(unicodes=wanted)
    cutter.subset(whole)
    small = BytesIO()
    whole.save(small)
    for name, weight in WEIGHTS.items():
        small.seek(0)
        font = FontFile(small, recalcTimestamp=False)
        instancer.instantiateVariableFont(font, {"wght": weight}, inplace=True)
        font["name"].setName(f"NotoSansTC-{weight}", 6, 3, 1, 0x409)
        one = BytesIO()
        font.save(one)
        one.seek(0)
        pdfmetrics.registerFont(TTFont(name, one))
    pdfmetrics.registerFontFamily("Sample", "Sample", "Sample-Bold", "Sample", "Sample-Bold")


class Item(Paragraph):
    """A list item whose bullet is drawn, so that it is not a character of the text."""

    def draw(self) -> None:
        self.canv.setFillColor(ACCENT)
        first = self.height - self.style.leading + 0.62 * self.style.fontSize
        self.canv.circle(self.style.leftIndent - 8, first + 1.4, 1.5, stroke=0, fill=1)
        super().draw()


class Heading(Paragraph):
    """A heading that also enters the PDF's outline."""

    level = 0


class Grinder(Flowable):
    """A drawing of the Tarsel 64, line by line: hopper, collar, body, outlet, cup."""

    def wrap(self, width: float, _height: float) -> tuple[float, float]:
        return width, 90 * mm

    def draw(self) -> None:
        pen = self.canv
        pen.setFillColor(TINT)
        pen.roundRect(0, 3 * mm, WIDTH, 86 * mm, 3 * mm, stroke=0, fill=1)
        pen.saveState()
        pen.translate(WIDTH / 2, 13 * mm)
        pen.setStrokeColor(INK)
        pen.setLineWidth(1.1)
        pen.setLineJoin(1)
        _shape(pen, white, [(-17, 42), (17, 42), (14, 60), (-14, 60)])  # hopper
        pen.setFillColor(ACCENT)
        for x, y in ((-9, 46), (-3, 45), (3, 47), (9, 45), (-6, 49), (0, 50), (6, 50), (-1, 53)):
            _bean(pen, x * mm, y * mm)
        _shape(pen, DEEP, [(-15, 60), (15, 60), (14, 63), (-14, 63)])  # lid
        _box(pen, INK, -14, 36, 28, 6)  # collar
        pen.setStrokeColor(RULE)
        for x in range(-12, 13, 2):
            tall = 3.6 if x % 6 == 0 else 2.2
            pen.line(x * mm, 37 * mm, x * mm, (37 + tall) * mm)
        pen.setStrokeColor(INK)
        _box(pen, DEEP, -12, 6, 24, 30)  # body
        _shape(pen, INK, [(-5, 27), (5, 27), (3, 21), (-3, 21)])  # outlet
        _shape(pen, white, [(-6, 4), (6, 4), (7.5, 16), (-7.5, 16)])  # dosing cup
        _shape(pen, ACCENT, [(-6, 4), (6, 4), (6.6, 9), (-6.6, 9)])  # ground coffee
        pen.setFillColor(white)
        pen.circle(0, 31.5 * mm, 1.1 * mm, stroke=0, fill=1)  # light
        _box(pen, INK, -16, 0, 32, 4)  # foot
        pen.setLineWidth(0.6)
        pen.setStrokeColor(SOFT)
        pen.line(-48 * mm, 0, 48 * mm, 0)
        pen.restoreState()


def _shape(pen: Canvas, fill: Color, points: Sequence[tuple[float, float]]) -> None:
    path = pen.beginPath()
    path.moveTo(points[0][0] * mm, points[0][1] * mm)
    for x, y in points[1:]:
        path.lineTo(x * mm, y * mm)
    path.close()
    pen.setFillColor(fill)
    pen.drawPath(path, stroke=1, fill=1)


def _box(pen: Canvas, fill: Color, x: float, y: float, width: float, height: float) -> None:
    pen.setFillColor(fill)
    pen.roundRect(x * mm, y * mm, width * mm, height * mm, 1.2 * mm, stroke=1, fill=1)


def _bean(pen: Canvas, x: float, y: float) -> None:
    pen.ellipse(x - 5.5, y - 3.6, x + 5.5, y + 3.6, stroke=0, fill=1)
    pen.saveState()
    pen.setStrokeColor(TINT)
    pen.setLineWidth(0.7)
    pen.bezier(x - 5, y, x - 2, y + 2, x + 2, y - 2, x + 5, y)
    pen.restoreState()


def _logo(pen: Canvas, x: float, y: float, size: float, colour: Color, light: Color) -> None:
    """The shop's mark: a lantern with a flame, `size` high, its lower left corner at x, y."""
    unit = size / 16
    pen.saveState()
    pen.translate(x, y)
    pen.setFillColor(colour)
    pen.setStrokeColor(colour)
    pen.setLineWidth(unit * 1.1)
    pen.arc(4 * unit, 11 * unit, 8 * unit, 16 * unit, 0, 180)
    pen.roundRect(unit, 2 * unit, 10 * unit, 11 * unit, 4 * unit, stroke=0, fill=1)
    pen.rect(3 * unit, 0, 6 * unit, 1.3 * unit, stroke=0, fill=1)
    flame = pen.beginPath()
    flame.moveTo(6 * unit, 11 * unit)
    flame.curveTo(10 * unit, 6.5 * unit, 8.5 * unit, 4 * unit, 6 * unit, 4 * unit)
    flame.curveTo(3.5 * unit, 4 * unit, 2 * unit, 6.5 * unit, 6 * unit, 11 * unit)
    pen.setFillColor(light)
    pen.drawPath(flame, stroke=0, fill=1)
    pen.restoreState()


class Document(BaseDocTemplate):
    """A shop document: masthead above, title and page number below, an outline beside."""

    def __init__(self, target: BytesIO, source: Source) -> None:
        super().__init__(
            target,
            pagesize=PAGE,
            title=source.title,
            author=SHOP[source.lang],
            creator="scripts/make_samples.py",
            lang=source.lang,
            invariant=1,
        )
        self.source = source
        frame = Frame(MARGIN, BOTTOM, WIDTH, PAGE[1] - TOP - BOTTOM, 0, 0, 0, 0)
        self.addPageTemplates(
            PageTemplate(frames=[frame], onPage=self._masthead, onPageEnd=self._footer)
        )

    def afterFlowable(self, flowable: Flowable) -> None:  # noqa: N802 - reportlab names it
        """Put each heading into the outline; reportlab calls this after each part."""
        if isinstance(flowable, Heading):
            text = flowable.getPlainText()
            key = f"p{self.page}-{text}"
            self.canv.bookmarkPage(key)
            self.canv.addOutlineEntry(text, key, flowable.level, closed=0)

    def _masthead(self, pen: Canvas, _: BaseDocTemplate) -> None:
        if pen.getPageNumber() == 1:
            pen.setFillColor(DEEP)
            pen.rect(0, PAGE[1] - 17 * mm, PAGE[0], 17 * mm, stroke=0, fill=1)
            _logo(pen, MARGIN, PAGE[1] - 13 * mm, 9 * mm, HexColor("#f2c484"), DEEP)
            pen.setFillColor(white)
            pen.setFont("Sample-Bold", 11.5)
            pen.drawString(MARGIN + 10 * mm, PAGE[1] - 10.4 * mm, SHOP[self.source.lang])
        else:
            _logo(pen, MARGIN, PAGE[1] - 15.5 * mm, 6 * mm, DEEP, HexColor("#f2c484"))
            pen.setStrokeColor(RULE)
            pen.setLineWidth(0.6)
            pen.line(MARGIN + 8 * mm, PAGE[1] - 12.5 * mm, PAGE[0] - MARGIN, PAGE[1] - 12.5 * mm)

    def _footer(self, pen: Canvas, _: BaseDocTemplate) -> None:
        pen.setFillColor(SOFT)
        pen.setFont("Sample-Light", 7.5)
        place = f"{pen.getPageNumber()} / {self.source.pages}"
        pen.drawString(MARGIN, 10 * mm, f"{self.source.title} · {place}")


def _styles(lang: str) -> dict[str, ParagraphStyle]:
    body = ParagraphStyle(
        "body",
        fontName="Sample",
        fontSize=10.3,
        leading=16.6 if lang == "en" else 18,
        textColor=INK,
        alignment=TA_LEFT,
        spaceAfter=6,
        bulletFontName="Sample",
        bulletFontSize=10.3,
        wordWrap=None if lang == "en" else "CJK",
    )

    def style(name: str, **changes: object) -> ParagraphStyle:
        return ParagraphStyle(name, parent=body, **changes)

    return {
        "body": body,
        "h1": style("h1", fontName="Sample-Bold", fontSize=23, leading=30, textColor=DEEP),
        "h2": style(
            "h2",
            fontName="Sample-Bold",
            fontSize=13.5,
            leading=19,
            textColor=ACCENT,
            spaceBefore=12,
            spaceAfter=6,
        ),
        "item": style("item", leftIndent=13, spaceAfter=2.6),
        "step": style("step", leftIndent=18, bulletIndent=2, spaceAfter=2.6),
        "box": style("box", spaceAfter=0),
    }


def _markup(node: SyntaxTreeNode, breaks: str = " ") -> str:
    """Inline Markdown as reportlab's small markup; a soft line break becomes `breaks`."""
    if node.type == "text":
        return escape(node.content, quote=False)
    if node.type == "softbreak":
        return breaks
    inner = "".join(_markup(child, breaks) for child in node.children)
    return f"<b>{inner}</b>" if node.type == "strong" else inner


def _table(source: Source, node: SyntaxTreeNode) -> Table:
    """A table as wide as the page whose every cell is one line."""
    cells = _cells(node)
    head = node.children[0].children[0]
    right = ["right" in str(cell.attrs.get("style", "")) for cell in head.children]
    size, pad = 8.9, 5.0
    # Tables under the same header share their columns, so that they line up down the page.
    alike = [_cells(other) for other in source.nodes if other.type == "table"]
    alike = [other for other in alike if other[0] == cells[0]]
    widths = [
        2 * pad
        + max(
            pdfmetrics.stringWidth(
                row[column], "Sample" if row is not other[0] else "Sample-Bold", size
            )
            for other in alike
            for row in other
        )
        for column in range(len(right))
    ]
    slack = WIDTH - sum(widths)
    if slack < 0:
        raise SampleError(f"{source.path.name}: a row is too wide by {-slack:.0f} pt: {cells[0]}")
    widths = [width + slack / len(right) for width in widths]
    look: list[tuple[object, ...]] = [
        ("FONT", (0, 0), (-1, -1), "Sample", size, size * 1.25),
        ("FONT", (0, 0), (-1, 0), "Sample-Bold", size, size * 1.25),
        ("TEXTCOLOR", (0, 0), (-1, -1), INK),
        ("TEXTCOLOR", (0, 0), (-1, 0), white),
        ("BACKGROUND", (0, 0), (-1, 0), DEEP),
        ("ROWBACKGROUNDS", (0, 1), (-1, -1), [white, TINT]),
        ("LINEBELOW", (0, 1), (-1, -1), 0.4, RULE),
        ("LEFTPADDING", (0, 0), (-1, -1), pad),
        ("RIGHTPADDING", (0, 0), (-1, -1), pad),
        ("TOPPADDING", (0, 0), (-1, -1), 4),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 5.2),
    ]
    look += [("ALIGN", (i, 0), (i, -1), "RIGHT") for i, yes in enumerate(right) if yes]
    return Table(cells, widths, style=look, spaceBefore=3, spaceAfter=6, cornerRadii=[4] * 4)


def _cells(table: SyntaxTreeNode) -> list[list[str]]:
    """The text of a table, header row first."""
    return [
        [_plain(cell) for cell in row.children] for part in table.children for row in part.children
    ]


def _plain(node: SyntaxTreeNode) -> str:
    return "".join(leaf.content for leaf in node.walk() if leaf.type == "text")


def _box_of(text: str, style: ParagraphStyle) -> Table:
    look = [
        ("BACKGROUND", (0, 0), (-1, -1), TINT),
        ("LINEBEFORE", (0, 0), (0, -1), 2.4, ACCENT),
        ("LEFTPADDING", (0, 0), (-1, -1), 11),
        ("TOPPADDING", (0, 0), (-1, -1), 6),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 8),
    ]
    return Table([[Paragraph(text, style)]], [WIDTH], style=look, spaceBefore=9, spaceAfter=4)


def flow(source: Source) -> Iterator[Flowable]:
    """The document's parts in order, as reportlab sets them."""
    styles = _styles(source.lang)
    for node in source.nodes:
        if _comment(node) == "page":
            yield PageBreak()
        elif node.type == "heading":
            heading = Heading(_markup(node), styles[node.tag])
            heading.level = int(node.tag[1]) - 1
            yield heading
        elif node.type == "paragraph":
            if any(leaf.attrs.get("src") == "drawing:grinder" for leaf in node.walk()):
                yield Grinder()
            else:
                yield Paragraph(_markup(node), styles["body"])
        elif node.type == "bullet_list":
            yield from (Item(_markup(item), styles["item"]) for item in node.children)
            yield Spacer(0, 3)
        elif node.type == "ordered_list":
            for number, item in enumerate(node.children, 1):
                yield Paragraph(_markup(item), styles["step"], bulletText=f"{number}.")
            yield Spacer(0, 3)
        elif node.type == "table":
            yield _table(source, node)
        elif node.type == "blockquote":
            yield _box_of(_markup(node, "<br/>"), styles["box"])
        else:
            raise SampleError(f"{source.path.name}: cannot set {node.type} {node.content!r}")


def make_pdf(source: Source) -> bytes:
    """The PDF of one source; raises SampleError when its text overruns the pages it names."""
    target = BytesIO()
    document = Document(target, source)
    document.build(list(flow(source)))
    if document.page != source.pages:
        raise SampleError(
            f"{source.path.name}: names {source.pages} pages but fills {document.page}; "
            "move a <!-- page --> or shorten the text"
        )
    return target.getvalue()


def same_document(left: bytes, right: bytes) -> bool:
    """Whether two PDFs are the same bytes, or say and show the same where zlib packs otherwise."""
    return left == right or _seen(left) == _seen(right)


def _seen(data: bytes) -> list[tuple[str, bytes]]:
    """The text and the pixels of each page; empty for what is no PDF."""
    try:
        document = pdfium.PdfDocument(data)
    except pdfium.PdfiumError:
        return []
    return [
        (page.get_textpage().get_text_bounded(), bytes(page.render(scale=1).buffer))
        for page in document
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the sample PDFs, or check those that are there; the exit status is 0 when all is well.

    `--check` compares the PDFs in `data/samples/` with what the Markdown gives and writes nothing.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args(arguments).check
    sources = [read_source(path) for path in sorted(SOURCES.glob("*.md"))]
    register_fonts(
        "".join(source.path.read_text(encoding="utf-8") for source in sources)
        + "".join(SHOP.values())
    )
    wrong = {path.name for path in OUTPUT.glob("*.pdf")} - {f"{s.path.stem}.pdf" for s in sources}
    for source in sources:
        made = make_pdf(source)
        target = OUTPUT / f"{source.path.stem}.pdf"
        if not check:
            OUTPUT.mkdir(parents=True, exist_ok=True)
            target.write_bytes(made)
            print(f"{target.name}: {source.pages} pages, {len(made) / 1024:.0f} KiB")
        elif not target.exists() or not same_document(made, target.read_bytes()):
            wrong.add(target.name)
    for name in sorted(wrong):
        print(
            f"data/samples/{name} is not what scripts/samples/ gives; "
            "run python scripts/make_samples.py",
            file=sys.stderr,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
