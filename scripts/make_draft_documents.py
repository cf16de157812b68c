"""The documents that the shipped draft is trained on: manuals that Debian distributes, as Markdown.

    python scripts/make_draft_documents.py documents/

fetches the packages below with apt (on Debian 12 or later, with its package lists) and writes one
Markdown file for each page, and what was taken of which package into documents/sources.json. All
are of Debian's main section, so under free licences.
"""

import argparse
import fnmatch
import hashlib
import json
import re
import subprocess
import tempfile
from html.parser import HTMLParser
from itertools import dropwhile
from pathlib import Path

# The pages to take of each package: path patterns.
PACKAGES = {
    "apache2-doc": ["*/manual/en/*.html", "*/manual/howto/*.html.en", "*/manual/*.html.en"],
    "aptitude-doc-en": ["*/html/en/*.html"],
    "debian-faq": ["*/FAQ/*.en.html"],
    "debian-handbook": ["*/html/en-US/*.html"],
    "debian-policy": ["*/policy.html/*.html"],
    "debian-reference-en": ["*/debian-reference/*.en.html"],
    "debian-reference-zh-tw": ["*/debian-reference/*.zh-tw.html"],
    "developers-reference": ["*/developers-reference/*.html"],
    "gnome-user-docs": ["*/help/C/*/*.page"],
    "installation-guide-amd64": ["*/installation-guide-amd64/en/*.html"],
    "libreoffice-help-en-us": ["*/text/*/guide/*.html"],
    "sqlite3-doc": ["*/doc/sqlite3/*.html"],
}
LEAST, MOST = 500, 60_000  # characters of a page
OF_PACKAGE = 400_000  # characters of one package, so that none stands for all
_SKIPPED = {"head", "script", "style", "nav", "header", "footer", "info", "form", "svg"}
_HEADINGS = {"h1": 1, "h2": 2, "h3": 3, "h4": 4, "h5": 4, "h6": 4, "title": 1}
_BLOCKS = {"p", "li", "dt", "dd", "pre", "td", "th", "item", "tr", "div", "section", "br", "table"}


class Text(HTMLParser):
    """The headings and paragraphs of an HTML or Mallard page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._words: list[str] = []
        self._skipped: list[str] = []
        self._heading = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if self._skipped or tag in _SKIPPED:
            if tag == (self._skipped or [tag])[0]:
                self._skipped.append(tag)
            return
        if tag in _HEADINGS or tag in _BLOCKS:
            self.end_block()
            self._heading = _HEADINGS.get(tag, 0)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        if tag in _BLOCKS and not self._skipped:
            self.end_block()

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag == self._skipped[0]:
                self._skipped.pop()
        elif tag in _HEADINGS or tag in _BLOCKS:
            self.end_block()

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._words.append(data)

    def end_block(self) -> None:
        """The paragraph is whole."""
        text = re.sub(r"\s+", " ", "".join(self._words)).strip(" ¶")
        if text:
            self.blocks.append("#" * self._heading + " " * bool(self._heading) + text)
        self._words, self._heading = [], 0


def page(markup: str) -> str:
    """``markup`` as Markdown, from its first heading on."""
    text = Text()
    text.feed(markup)
    text.end_block()
    blocks = dropwhile(lambda block: not block.startswith("#"), text.blocks)
    return "\n\n".join(blocks) + "\n"


def by_name(file: Path) -> str:
    """A random order that is the same each time."""
    return hashlib.sha256(file.name.encode()).hexdigest()


def licences(package: Path) -> list[str]:
    """What the unpacked ``package`` says its licences are."""
    files = (file for file in package.rglob("usr/share/doc/*/copyright") if file.is_file())
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return sorted(set(re.findall(r"^License: *(\S.*?) *$", text, re.MULTILINE)))


def main() -> None:
    """Fetch, unpack, convert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    sources = []
    for package, patterns in PACKAGES.items():
        with tempfile.TemporaryDirectory() as temporary:
            subprocess.run(["apt-get", "-qq", "download", package], cwd=temporary, check=True)
            (archive,) = Path(temporary).glob("*.deb")
            unpacked = Path(temporary) / "unpacked"
            subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
            pages = size = 0
            for file in sorted(unpacked.rglob("*"), key=by_name):
                if file.is_symlink() or not file.is_file():
                    continue
                if not any(fnmatch.fnmatch(str(file), pattern) for pattern in patterns):
                    continue
                text = page(file.read_text(encoding="utf-8", errors="replace"))
                if not LEAST <= len(text) <= MOST or size + len(text) > OF_PACKAGE:
                    continue
                name = file.name.partition(".")[0]
                where = folder / package / f"{file.parent.name}-{name}.md"
                where.parent.mkdir(parents=True, exist_ok=True)
                where.write_text(text, encoding="utf-8")
                pages, size = pages + 1, size + len(text)
            version = archive.name.split("_")[1].replace("%3a", ":")
            print(f"{package} {version}: {pages} pages, {size / 1e6:.2f} million characters")
            sources.append(
                {
                    "package": package,
                    "version": version,
                    "licences": licences(unpacked),
                    "pages": pages,
                    "characters": size,
                }
            )
    (folder / "sources.json").write_text(json.dumps(sources, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
