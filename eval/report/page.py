"""The page: put together from its parts, and kept small enough."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from eval.catalogue import Catalogue, Damaged
from eval.errors import UserError
from eval.report import files
from eval.report.contents import Contents, collect

LIMIT = 10_000_000
"""Bytes of the page; half of them are for figures."""

_LENGTHS = (None, 4000, 2000, 1000, 500, 250, 120, 60, 20, 0)  # characters of a text, one after the other until it fits
_STYLES = ("base.css", "overview.css", "samples.css")
_SCRIPTS = ("dom.js", "filters.js", "cells.js", "sample.js", "samples.js", "page.js")


@dataclass(frozen=True)
class Page:
    """The finished page, a line that says what it shows, and the cells that it could not show."""

    html: str
    summary: str
    damaged: Sequence[Damaged]


def build(results: Path, out: Path, limit: int = LIMIT) -> Page:
    """Make the page of everything below a folder.

    Parameters
    ----------
    results
        The folder.
    out
        Where the page will be; its links are relative to it.
    limit
        Most bytes that it may have. Figures are scaled down and texts are cut until it fits.

    Raises
    ------
    UserError
        If `results` is not a folder, or what is in it does not fit into one page even without its texts.
    """
    contents = collect(Catalogue.read(results), out)
    summary = _summary(contents)
    template = _environment().get_template("page.html")
    shown = {
        "folder": results.resolve().name,
        "summary": summary,
        "damaged": [(files.link(one.folder, out), one.reason) for one in contents.damaged],
        "tables": files.tables(results, out),
        "figures": files.figures(results, out, limit // 2),
        "explorer": files.explorer_pages(results, out),
        "style": _assets(_STYLES),
        "script": _assets(_SCRIPTS),
    }
    shown["script_hash"] = base64.b64encode(hashlib.sha256(shown["script"].encode()).digest()).decode()
    for length in _LENGTHS:
        index = {"groups": contents.groups, "cells": contents.cells, "runs": contents.runs, "length": length}
        packed = [answers.pack(length) for answers in contents.answers]
        html = template.render(**shown, index=index, packed=packed)
        if len(html.encode()) <= limit:
            return Page(html, summary, contents.damaged)
    raise UserError(
        f"{results} has too many results for one page of {limit / 1e6:g} MB: name one of its folders, such as a model's"
    )


def _summary(contents: Contents) -> str:
    """Such as `1 model, 2 tasks, 26 cells, 650 results`."""
    counts = contents.counts
    parts = [
        f"{counts[noun]:,} {noun}{'' if counts[noun] == 1 else 's'}" for noun in ("model", "task", "cell", "result")
    ]
    return ", ".join(parts + [f"{counts[noun]:,} {noun}" for noun in ("failed", "damaged") if counts[noun]])


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("eval.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _assets(names: Sequence[str]) -> Markup:
    folder = resources.files("eval.report").joinpath("assets")
    return Markup("\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names))
