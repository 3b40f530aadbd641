"""The samples of a group of cells with all answers, in columns, packed for the page."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from eval.catalogue import Record
from eval.report.numbers import Records, scores_of

FACTS = ("prompt", "references", "meta", "n_prompt", "n_prompt_raw", "truncated", "notes", "prompt_sha256")
"""What is shown of a sample, as far as its records hold it; the same for all cells."""


@dataclass(frozen=True)
class Answers:
    """What cells made of the samples that they share.

    Attributes
    ----------
    facts
        For each sample `sample` (its id) and whatever of `FACTS` is stored.
    texts
        The distinct answers.
    columns
        By number of the cell, each with a value a sample: `text` (number in `texts` or None), `finish`, `tokens`,
        `kept`, `scores` by name, `error`. Scores are rounded to six decimals, kept tokens a layer to one.
    """

    facts: list[dict[str, Any]]
    texts: list[str]
    columns: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, numbers: Sequence[int], cells: Sequence[Records], asked: Sequence[str]) -> Answers:
        """Bring the records of cells into columns; `numbers` are what the page calls these cells."""
        places: dict[str, int] = {}
        columns = {
            number: _columns([records.get(sample) for sample in asked], places)
            for number, records in zip(numbers, cells, strict=True)
        }
        return cls([_facts(sample, cells) for sample in asked], list(places), columns)

    def pack(self, length: int | None) -> str:
        """Base64 of the gzip of the JSON, with every text cut to `length` characters.

        `cut` holds the full length of each answer that was cut, by its number.
        """
        cut = {i: len(text) for i, text in enumerate(self.texts) if length is not None and len(text) > length}
        cells = {
            number: {**columns, "error": _shortened(columns["error"], length)}
            for number, columns in self.columns.items()
        }
        texts = [text[:length] for text in self.texts]
        values = {"facts": _shortened(self.facts, length), "texts": texts, "cut": cut, "cells": cells}
        text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        data = gzip.compress(text.encode("utf-8", "surrogatepass"), compresslevel=6, mtime=0)
        return base64.b64encode(data).decode()


def _columns(records: Sequence[Record | None], places: dict[str, int]) -> dict[str, Any]:
    """Columns of one cell; new texts get the next place in `places`."""
    done = [record if record and record["status"] == "ok" else {} for record in records]
    texts = [record.get("text") for record in done]
    names = sorted({name for record in records if record for name in scores_of(record)})
    return {
        "text": [None if text is None else places.setdefault(text, len(places)) for text in texts],
        "finish": [record.get("finish") for record in done],
        "tokens": [len(record["ids"]) if "ids" in record else None for record in done],
        "kept": [round(fmean(record["kept"]), 1) if record else None for record in done],
        "scores": {name: [_rounded(record.get("scores", {}).get(name)) for record in done] for name in names},
        "error": {i: record.get("error", "") for i, record in enumerate(records) if record and not done[i]},
    }


def _facts(sample: str, cells: Sequence[Records]) -> dict[str, Any]:
    """What is stored of a sample, from the first cell that finished it."""
    found = [records[sample] for records in cells if sample in records]
    record = next((record for record in found if record["status"] == "ok"), {})
    return {"sample": sample} | {name: record[name] for name in FACTS if name in record}


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 6)


def _shortened(value: Any, length: int | None) -> Any:
    """JSON values with each text cut to `length` characters and an ellipsis."""
    if isinstance(value, str) and length is not None and len(value) > length:
        return f"{value[:length]}…"
    if isinstance(value, dict):
        return {key: _shortened(part, length) for key, part in value.items()}
    if isinstance(value, list):
        return [_shortened(part, length) for part in value]
    return value
