"""What lies in a folder of results beside the records: tables, figures, pages of the retention explorer."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
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
    for name, paths in _by_name(root / TABLES):
        links = [link(path, page) for path in paths.values()]
        source = paths.get(".md", paths.get(".csv"))
        if source is None:
            continue
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
    found = [
        (name, paths[".png"], [link(path, page) for path in paths.values()])
        for name, paths in _by_name(root / FIGURES)
        if ".png" in paths
    ]
    for width in (None, *_WIDTHS):
        shown = [_figure(name, path, links, width) for name, path, links in found]
        if sum(len(figure.image or "") for figure in shown) <= room:
            return shown
    used, fitting = 0, []
    for figure in shown:
        used += len(figure.image or "")
        fits = used <= room
        fitting.append(
            figure
            if fits
            else Shown(figure.name, figure.name, figure.links, note="no room on this page: open the file")
        )
    return fitting


def explorer_pages(root: Path, page: Path) -> list[Link]:
    """The pages of the retention explorer by their titles."""
    paths = sorted((root / EXPLORER).glob("*.html"))
    return [Link(_title(path) or path.stem, link(path, page).href) for path in paths]


def _by_name(folder: Path) -> Iterator[tuple[str, dict[str, Path]]]:
    """Files of a folder by their common name, each with its paths by suffix."""
    together: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.*")):
        together.setdefault(path.stem, {})[path.suffix] = path
    yield from together.items()


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


def _figure(name: str, path: Path, links: Sequence[Link], width: int | None) -> Shown:
    """A figure with its image, at most `width` pixels wide."""
    data = path.read_bytes()
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
