"""The retention explorer's page: one HTML file that holds its data, its style and its script, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb

from eval import style
from graphkv.engine import Cell
from graphkv.graph import Edges
from graphkv.packing import Packer
from graphkv.retention import Retention

FOLDER = Path(__file__).parent / "explorer_page"
_LEVELS = {"k": 8, "a": 5, "b": 5, "g": 3}  # levels of colour, as in 3-tokens.js
_HUES = {  # only A, only B, both: told apart with any colour vision (Okabe and Ito's palette)
    "light": {"a": "#D55E00", "b": "#0072B2", "g": "#9a9fa8"},
    "dark": {"a": "#E69F00", "b": "#56B4E9", "g": "#808080"},
}
_PANELS = {"light": "#ffffff", "dark": "#1a1f26"}  # what is behind the text, as in page.css


def describe_cell(cell: Cell, found: Retention, part: Mapping[str, Any], pack: Packer) -> dict[str, Any]:
    """What the page is told of a cell; arrays go into `pack` and are named.

    Parameters
    ----------
    cell, found
        The cell and what it did with the tokens.
    part
        Its record of `graphkv.measures.answer`.
    pack
        Of the page.
    """
    scorer = cell.settings.scorer
    has_graph = found.factors is not None
    return {
        "label": cell.settings.label,
        "settings": cell.settings.describe(),
        "keeps_all": scorer.keeps_all,
        "window": scorer.window,
        "sinks": scorer.sinks,
        "heads": found.kept.shape[1],
        "kept_per_layer": cell.kept_per_layer,
        "bytes": cell.bytes,
        "answer": part["text"],
        "scores": part["scores"],
        "similarity": _numbers(found.similarity),
        "kept": pack.add(found.kept, "bits"),
        "ranks": pack.add(found.ranks, "u2"),
        "plain_ranks": pack.add(found.plain_ranks, "u2") if has_graph else None,
        "factors": pack.add(found.factors, "f4") if has_graph else None,
        "edges": _describe_edges(found.edges, pack) if has_graph else None,
    }


def _describe_edges(layers: Sequence[tuple[Edges, ...]], pack: Packer) -> dict[str, Any]:
    """Edges as flat arrays, in the order layer, head, choice of sources, source, neighbour.

    `choices`, `k` and `m` say how many a layer has; `m` is null where every other token is a neighbour.
    """
    sources, neighbors, similarity = [np.empty(0)], [np.empty(0)], [np.empty(0)]
    for choices in layers:
        for head in range(len(choices[0].sources) if choices else 0):
            for edges in choices:
                sources.append(edges.sources[head].cpu().numpy())
                if edges.neighbors is not None:
                    neighbors.append(edges.neighbors[head].flatten().cpu().numpy())
                    similarity.append(edges.similarity[head].flatten().cpu().numpy())
    first = [choices[0] if choices else None for choices in layers]
    return {
        "choices": [len(choices) for choices in layers],
        "k": [edges.sources.shape[1] if edges else 0 for edges in first],
        "m": [0 if edges is None else None if edges.neighbors is None else edges.neighbors.shape[2] for edges in first],
        "sources": pack.add(np.concatenate(sources), "u2"),
        "neighbors": pack.add(np.concatenate(neighbors), "u2"),
        "similarity": pack.add(np.concatenate(similarity), "f4"),
    }


def _numbers(values: np.ndarray) -> list[list[float | None]]:
    """Numbers with five decimals as JSON has them; NaN becomes null."""
    return [[None if math.isnan(value) else round(float(value), 5) for value in row] for row in values]


def render(document: Mapping[str, Any]) -> str:
    """The page that shows `document`.

    Whatever the prompt and the answers contain is data to the page: no character of theirs can end the element that
    holds them, and its policy lets no script run but its own and lets nothing be loaded.
    """
    css = colours() + (FOLDER / "page.css").read_text(encoding="utf-8")
    scripts = sorted(FOLDER.glob("*.js"))
    script = '"use strict";\n' + "\n".join(file.read_text(encoding="utf-8") for file in scripts)
    policy = f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(script)}'"
    data = json.dumps(document, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    values = {"title": html.escape(document["title"]), "style": css, "script": script, "policy": policy, "data": data}
    # In one pass, so that what a value contains is not looked at again.
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _hash(source: str) -> str:
    """What a Content-Security-Policy calls an inline element by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def colours() -> str:
    """A style sheet with the classes k1 … k8 (shares), a1 … a5, b1 … b5 (only one) and g1 … g3 (both), light and dark.

    Shares use the colour map of the figures, turned so that more is always further from what is behind the text.
    """
    schemes = {name: _scheme(name) for name in _PANELS}
    rules = "".join(f".{name}{{background:var(--{name});color:var(--{name}-ink)}}\n" for name in schemes["light"])
    light, dark = (
        "".join(f"--{name}:{_hex(colour)};--{name}-ink:{_ink(colour)};" for name, colour in scheme.items())
        + f"--k0:{_PANELS[which]};"
        for which, scheme in schemes.items()
    )
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{rules}"


def _scheme(which: str) -> dict[str, np.ndarray]:
    """Colours by class, mixed with what is behind them so that low levels are faint."""
    behind, cmap = np.array(to_rgb(_PANELS[which])), colormaps[style.CMAP]
    colours = {}
    for letter, levels in _LEVELS.items():
        for level in range(1, levels + 1):
            place = (level - 1) / (levels - 1)
            if letter == "k":
                strong = np.array(cmap(1 - place if which == "light" else 0.3 + 0.7 * place)[:3])
            else:
                strong = np.array(to_rgb(_HUES[which][letter]))
            colours[f"{letter}{level}"] = behind + (0.3 + 0.7 * place) * (strong - behind)
    return colours


def _hex(colour: np.ndarray) -> str:
    return to_hex(colour)


def _ink(colour: np.ndarray) -> str:
    """Black or white, whichever is easier to read on a colour (WCAG 2, relative luminance)."""
    return "#000" if contrast(colour, np.zeros(3)) >= contrast(colour, np.ones(3)) else "#fff"


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    """Contrast ratio of two sRGB colours in [0, 1], from 1 to 21 (WCAG 2.2)."""
    low, high = sorted(_luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: np.ndarray) -> float:
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))
