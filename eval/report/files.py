"""What lies in a folder of results beside the records: tables, figures, pages of the retention explorer."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from itertools import accumulate
from os.path import relpath
from pathlib import Path
from urllib.parse import quote

from markdown_it import MarkdownIt
from markupsafe import Markup
from PIL import Image

TABLES, FIGURES, EXPLORER = "tables", "figures", "explorer"
_WIDTHS = (1600, 1200, 900, 600, 400)  # pixels: what figures are scaled down to, one after the other, until they fit
_TABLE_BYTES = 100_000  # a larger table is linked only
_ROWS = 200  # of a table that is there as CSV alone
# Tables have no links of their own, so that what looks like one in a name is a part of it.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "image", "autolink"])


@dataclass(frozen=True)
class Link:
    """A file beside the page: what it is called there, and its relative URL."""

    name: str
    href: str


@dataclass(frozen=True)
class Shown:
    """A table or figure.

    Attributes
    ----------
    name
        Its files' common name.
    title
        What it is headed by.
    links
        All its files.
    html
        A table's contents.
    image
        A figure's data URI; None where it cannot be read or does not fit.
    width, height
        Of the embedded image, in pixels.
    note
        Why something is not shown.
    """

    name: str
    title: str
    links: Sequence[Link]
    html: Markup | None = None
    image: str | None = None
    width: int = 0
    height: int = 0
    note: str = ""


def link(path: Path, page: Path) -> Link:
    """How a page refers to a file."""
    return Link(path.name, quote(relpath(path, page.parent), safe="/+=,"))


def tables(root: Path, page: Path) -> list[Shown]:
    """All tables, from their Markdown or, without it, their CSV."""
    shown = []
    for source, paths in _by_name(root / TABLES, (".md", ".csv")):
        name, links = source.stem, [link(path, page) for path in paths]
        if source.stat().st_size > _TABLE_BYTES:
            shown.append(Shown(name, name, links, note=f"{source.stat().st_size / 1e6:.1f} MB: open the file"))
            continue
        text = source.read_text(encoding="utf-8", errors="replace")
        title, body = _heading(text) if source.suffix == ".md" else ("", text)
        html = _MARKDOWN.render(body) if source.suffix == ".md" else _csv_table(body)
        shown.append(Shown(name, title or name, links, html=Markup(html)))
    return shown


def figures(root: Path, page: Path, room: int) -> list[Shown]:
    """All figures, their images scaled down where together they would take more than `room` bytes of the page."""
    found = [(path, [link(one, page) for one in paths]) for path, paths in _by_name(root / FIGURES, (".png",))]
    for width in (None, *_WIDTHS):
        shown = [_figure(path, links, width) for path, links in found]
        if sum(len(figure.image or "") for figure in shown) <= room:
            return shown
    used = list(accumulate(len(figure.image or "") for figure in shown))
    unseen = {"image": None, "note": "no room on this page: open the file"}
    return [figure if end <= room else replace(figure, **unseen) for figure, end in zip(shown, used, strict=True)]


def explorer_pages(root: Path, page: Path) -> list[Link]:
    """The pages of the retention explorer by their titles."""
    paths = sorted((root / EXPLORER).glob("*.html"))
    return [Link(_title(path) or path.stem, link(path, page).href) for path in paths]


def _by_name(folder: Path, suffixes: Sequence[str]) -> Iterator[tuple[Path, list[Path]]]:
    """Files that are shown, each with all that belong to it: those of its name, and parts such as `NAME-means.csv`.

    Parameters
    ----------
    folder
        Of tables or figures.
    suffixes
        What can be shown, the best first.
    """
    paths = sorted(path for path in folder.glob("*.*") if path.is_file())
    shown = {path.stem: path for path in paths if path.suffix == suffixes[0]}
    for suffix in suffixes[1:]:
        shown |= {path.stem: path for path in paths if path.suffix == suffix and _owner(path, shown) is None}
    for name in sorted(shown):
        yield shown[name], [path for path in paths if _owner(path, shown) == name]


def _owner(path: Path, names: Collection[str]) -> str | None:
    """The longest of the names that a file has or begins with."""
    found = [name for name in names if path.stem == name or path.stem.startswith(f"{name}-")]
    return max(found, key=len, default=None)


def _heading(text: str) -> tuple[str, str]:
    """Heading of a Markdown text, empty if it does not begin with one, and what follows."""
    first, _, rest = text.partition("\n")
    return (first.strip("# "), rest) if first.startswith("#") else ("", text)


def _csv_table(text: str) -> str:
    """The first rows of a CSV file as HTML."""
    head, *rows = csv.reader(io.StringIO(text))
    cells = "".join(Markup("<th>{}</th>").format(name) for name in head)
    lines = [f"<thead><tr>{cells}</tr></thead>"]
    for row in rows[:_ROWS]:
        lines.append("<tr>" + "".join(Markup("<td>{}</td>").format(value) for value in row) + "</tr>")
    more = f"<p>{len(rows) - _ROWS} more rows are in the file.</p>" if len(rows) > _ROWS else ""
    return f"<table>{''.join(lines)}</table>{more}"


def _figure(path: Path, links: Sequence[Link], width: int | None) -> Shown:
    """A figure with its image, at most `width` pixels wide."""
    name, data = path.stem, path.read_bytes()
    try:
        with Image.open(io.BytesIO(data)) as image:
            if width is not None and image.width > width:
                image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
                stream = io.BytesIO()
                image.save(stream, "PNG", optimize=True)
                data = stream.getvalue()
            else:
                image.verify()
            size = image.size
    except (OSError, SyntaxError) as error:  # what Pillow raises for a broken PNG
        return Shown(name, name, links, note=f"{path.name} is not a readable image: {error}")
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return Shown(name, name, links, image=uri, width=size[0], height=size[1])


class _TitleParser(HTMLParser):
    """Collects the text of the first `title` element."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self._inside, self._over = "", False, False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "title" and not self._over

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._inside, self._over = False, True


def _title(path: Path) -> str:
    """Title of an HTML page, from its beginning."""
    parser = _TitleParser()
    with path.open(encoding="utf-8", errors="replace") as stream:
        parser.feed(stream.read(20_000))
    return " ".join(parser.text.split())
