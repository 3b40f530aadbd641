"""All records as one tidy table: a row a cell and sample, for a spreadsheet, pandas, R or polars.

The columns, in this order. Of `graph_…` and `score_…` there is one for each field and score that was found.

===============================  ====================================================================================
`model`, `dtype`, `device`,      what ran; `data` is the sha256 of the task's data, `protocol` is empty where the
`attention`, `task`, `data`,     task has none
`protocol`
`scorer`, `scorer_options`       its name, and all its options as JSON
`budget`, `budget_ratio`         what was asked for: tokens a layer, or a share of the prompt; the other one is empty
`granularity`, `head_budget`,    see `conf/config.yaml`
`head_floor`, `bias`, `fold`
`selector`, `selector_options`   what chooses among the scores; its options as JSON, empty for `topk`
`graphkv`, `graph_<field>`       whether scores were re-ranked, and how; fields are empty where they were not
`decode`, `evict_every`          batch or solo, and whether eviction went on in decode
`cell`, `key`                    readable name of the cell, and the hash that stands for all of the above
`sample`, `status`               with `key`, what a row is; `ok` or `failed`
`score_<name>`                   each score of the task
`kept`                           achieved budget: tokens kept a layer, the mean over layers
`bytes`                          of the compressed cache
`n_prompt`, `tokens`, `finish`   tokens of the prompt and of the answer; why the answer ended
`seconds_prefill`,               the cell's share of wall time; a prefill is shared evenly by the cells of its pass
`seconds_select`,
`seconds_decode`
`decode_batch`, `shared_with`    rows that were decoded together; the cell that wrote this answer as it kept the same
`run`, `git_commit`,             what produced the row: the name of an entry in the manifest's `runs`, and its code
`git_dirty`
`text`, `error`                  the answer; what went wrong
===============================  ====================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow.csv import write_csv

from eval.cells import CellFolder, look
from eval.errors import UserError
from eval.records import key_of, replacing

_TYPES: Mapping[str, str] = {
    **dict.fromkeys(["model", "dtype", "device", "attention", "task", "data", "protocol"], "string"),
    **dict.fromkeys(["scorer", "scorer_options"], "string"),
    "budget": "Int64",
    "budget_ratio": "Float64",
    "granularity": "string",
    "head_budget": "string",
    "head_floor": "Float64",
    "bias": "string",
    "fold": "boolean",
    **dict.fromkeys(["selector", "selector_options"], "string"),
    "graphkv": "boolean",
    "graph_": "",
    "decode": "string",
    "evict_every": "Int64",
    **dict.fromkeys(["cell", "key", "sample", "status"], "string"),
    "score_": "Float64",
    "kept": "Float64",
    **dict.fromkeys(["bytes", "n_prompt", "tokens"], "Int64"),
    "finish": "string",
    **dict.fromkeys(["seconds_prefill", "seconds_select", "seconds_decode"], "Float64"),
    "decode_batch": "Int64",
    **dict.fromkeys(["shared_with", "run", "git_commit"], "string"),
    "git_dirty": "boolean",
    **dict.fromkeys(["text", "error"], "string"),
}
"""Type of each column, or nothing where the values tell; a name that ends with `_` stands for all that begin so."""


def tidy(cells: Iterable[CellFolder]) -> pd.DataFrame:
    """The table of cells that have no problems; see the module for its columns."""
    rows = []
    for cell in cells:
        if cell.records:
            described = _describe_cell(cell)
            rows += [{**described, **_describe_record(record, cell.runs)} for record in cell.records.values()]
    found = dict.fromkeys(name for row in rows for name in row)
    types = {}
    for column, kind in _TYPES.items():
        names = [name for name in found if name.startswith(column)] if column.endswith("_") else [column]
        types |= dict.fromkeys(names, kind)
    frame = pd.DataFrame(rows, columns=list(types), dtype=object)
    return frame.astype({name: kind or _type_of(frame[name]) for name, kind in types.items()})


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as `.csv` or `.parquet`, whole or not at all.

    CSV is UTF-8, with every text in quotes and nothing at all for a missing value.

    Raises
    ------
    UserError
        If the file has another suffix, or cannot be written.
    """
    check_name(path)
    try:
        with replacing(path) as part, part.open("wb") as stream:
            if path.suffix.lower() == ".csv":
                # pandas leaves a lone carriage return without quotes, and readers then see two rows.
                write_csv(pa.Table.from_pandas(frame, preserve_index=False), stream)
            else:
                frame.to_parquet(stream, index=False)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def check_name(path: Path) -> None:
    """Refuse a file that is neither `.csv` nor `.parquet`, with a UserError."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise UserError(f"cannot export to {path}: its name must end with .csv or .parquet")


def _describe_cell(cell: CellFolder) -> dict[str, Any]:
    identity, facts = cell.identity, cell.facts
    settings = identity["cell"]
    options = {name: value for name, value in settings["scorer"].items() if name != "name"}
    graph, budget = settings["graphkv"] or {}, settings["budget"]
    selector = {
        name.removeprefix("selector_"): value for name, value in settings.items() if name.startswith("selector_")
    }
    return {
        **{name: facts[name] for name in ("model", "dtype", "task", "protocol", "scorer", "cell")},
        "device": look(identity, "model.device"),
        "attention": look(identity, "model.attention"),
        "data": look(identity, "task.data"),
        "scorer_options": json.dumps(options, ensure_ascii=False, sort_keys=True),
        "budget": budget if isinstance(budget, int) else None,
        "budget_ratio": budget if isinstance(budget, float) else None,
        "granularity": settings["granularity"],
        "head_budget": settings["head_budget"],
        "head_floor": settings.get("head_floor"),
        "bias": settings.get("bias", "none"),
        "fold": settings.get("fold", False),
        "selector": settings.get("selector", "topk"),
        "selector_options": json.dumps(selector, sort_keys=True) if selector else None,
        "graphkv": bool(graph),
        **{f"graph_{name}": value for name, value in graph.items()},
        "decode": identity["decode"]["mode"],
        "evict_every": look(identity, "decode.evict_every"),
        "key": key_of(identity),
    }


def _describe_record(record: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    run = runs[record["run"]]
    row = {name: record.get(name) for name in ("sample", "status", "run", "error")}
    row |= {name: run.get(name) for name in ("git_commit", "git_dirty")}
    if record["status"] == "failed":
        return row
    row |= {name: record.get(name) for name in ("text", "finish", "bytes", "n_prompt", "decode_batch", "shared_with")}
    row |= {f"score_{name}": value for name, value in record["scores"].items()}
    row |= {f"seconds_{part}": record["seconds"][part] for part in ("prefill", "select", "decode")}
    return {**row, "kept": mean(record["kept"]), "tokens": len(record["ids"])}


def _type_of(column: pd.Series) -> str:
    """The narrowest type that holds all values of a field: truth values, whole numbers, numbers or texts."""
    found = {type(value) for value in column.dropna()}
    for types, name in (({bool}, "boolean"), ({int}, "Int64"), ({int, float}, "Float64")):
        if found and found <= types:
            return name
    return "string"
