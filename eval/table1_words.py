"""What Table 1 is called: names and order of its rows, its title and its caption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eval.longbench import ROWS
from eval.metrics import LONGBENCH_E
from eval.paper import printed_average_differs
from eval.tables import MISSING

if TYPE_CHECKING:
    from eval.table1 import ModelResults, Row

AVERAGE = "avg"

SHORT: dict[str, str] = {
    "narrativeqa": "NrtvQA",
    "qasper": "Qasper",
    "multifieldqa_en": "MF-en",
    "hotpotqa": "HotpotQA",
    "2wikimqa": "2WikiMQA",
    "musique": "Musique",
    "gov_report": "GovReport",
    "qmsum": "QMSum",
    "multi_news": "MultiNews",
    "trec": "TREC",
    "triviaqa": "TriviaQA",
    "samsum": "SAMSum",
    "passage_count": "PCount",
    "passage_retrieval_en": "PRe",
    "lcc": "LCC",
    "repobench-p": "RB-P",
}
"""Column headings; those of LongBench-E end in `-E`."""
SHORT |= {task: f"{SHORT[task.removesuffix('_e')]}-E" for task in LONGBENCH_E}

SCORERS: Mapping[str, str] = {
    "full": "Full",
    "knorm": "KNorm",
    "snapkv": "SnapKV",
    "pyramidkv": "PyramidKV",
    "h2o": "H2O",
    "cake": "CAKE",
}
"""Names in rows, in the order of rows; others follow under their own."""

_WINDOWED = {"window": 32, "kernel": 7, "pooling": "avg", "group": "mean", "sinks": 0}
USUAL: Mapping[str, Mapping[str, Any]] = {
    "knorm": {"window": 0, "sinks": 0},
    "snapkv": _WINDOWED,
    "pyramidkv": {**_WINDOWED, "beta": 20, "schedule": "official"},
}
"""Options that a row's name leaves out: those of the paper's code base (`group` is ours, it has no KV heads)."""


def name(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Scorer and GraphKV, with what sets the row apart: unusual options, and whatever varies between `cells`."""
    scorer = cell["scorer"]
    usual = USUAL.get(scorer["name"], {})
    siblings = [other["scorer"] for other in cells if other["scorer"]["name"] == scorer["name"]]
    parts = {
        option: value
        for option, value in scorer.items()
        if (value != usual[option] if option in usual else _varies(option, siblings))
    }
    if scorer["name"] != "full":
        parts |= {key: cell[key] for key in _settings(cell) if _varies(key, _compressed(cells))}
    name = SCORERS.get(scorer["name"], scorer["name"]) + _bracketed(parts)
    if cell["graphkv"] is None:
        return name
    graphs = [other["graphkv"] for other in cells if other["graphkv"] is not None]
    changed = {option: value for option, value in cell["graphkv"].items() if _varies(option, graphs)}
    return f"{name}+GraphKV{_bracketed(changed)}"


def _settings(cell: Mapping[str, Any]) -> list[str]:
    """Keys of a cell beside scorer and graph: budget, granularity."""
    return sorted(cell.keys() - {"scorer", "graphkv"})


def _compressed(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cells that have a budget."""
    return [cell for cell in cells if cell["scorer"]["name"] != "full"]


def _varies(key: str, dicts: Sequence[Mapping[str, Any]]) -> bool:
    return any(other.get(key) != dicts[0].get(key) for other in dicts)


def _bracketed(parts: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{key} {value}'.replace('_', ' ') for key, value in parts.items())})" if parts else ""


def order(cell: Mapping[str, Any]) -> tuple:
    """Sorts cells: scorer, its usual options first, budget, and each row with GraphKV after the one without."""
    name, names = cell["scorer"]["name"], list(SCORERS)
    usual = USUAL.get(name, {})
    options = {key: value for key, value in cell["scorer"].items() if value != usual.get(key)}
    settings = {key: cell[key] for key in _settings(cell)}
    rank = names.index(name) if name in names else len(names)
    return rank, name, _sortable(options), _sortable(settings), _sortable(cell["graphkv"] or {})


def _sortable(values: Mapping[str, Any]) -> list[tuple]:
    """Items that compare although a value may be a number, a text or None."""
    return [(key, value is not None, isinstance(value, str), value) for key, value in sorted(values.items())]


def title(facts: Mapping[str, Any], tasks: Mapping[str, Sequence[str]], cells: Sequence[Mapping[str, Any]]) -> str:
    budgets = {cell["budget"] for cell in _compressed(cells)}
    budget = f", budget {_amount(*budgets)}" if len(budgets) == 1 else ""
    if facts["data"] == "mini":
        return f"Table 1. mini: a test bed, NOT LongBench{budget}"
    if any(len(ids) != ROWS[task] for task, ids in tasks.items()):
        return f"Table 1. A part of LongBench's rows{budget}"
    return f"Table 1. LongBench{budget}"


def _amount(budget: int | float) -> str:
    return f"{budget} tokens a layer" if isinstance(budget, int) else f"{budget:.4g} of the prompt a layer"


def caption(
    results: Sequence[ModelResults],
    tasks: Mapping[str, Sequence[str]],
    cells: Sequence[Mapping[str, Any]],
    blocks: Mapping[str, Sequence[Row]],
    resamples: int,
    seed: int,
) -> Iterator[str]:
    """Sentences that say what the numbers are, how they were made, and with what they may be compared."""
    facts = results[0].facts
    rows = [row for block in blocks.values() for row in block]
    yield (
        f"Protocol {facts['protocol']}; edit similarity {facts['similarity']}; data {facts['data']}, "
        f"sha256 {facts['data_hash'][:12]}; {_counts(tasks)}."
    )
    for result in results:
        yield _tally(result)
    yield (
        "Scores are 0 to 100: a task's is the mean of its samples, Avg. the mean of the 16 tasks; "
        f"{MISSING}: a sample or task is missing, and nothing is averaged over what is left."
    )
    kinds = sorted({cell["granularity"].replace("_", " ").replace("kv", "KV") for cell in _compressed(cells)})
    yield (
        f"kept: tokens stored a layer (mean over layers and samples{', per ' + ' or '.join(kinds) if kinds else ''}), "
        "the window included; of prompt: their share of it."
    )
    if any(row.difference for row in rows):
        yield (
            "Δ: difference to the row without GraphKV, all else equal, before rounding; last column: that of the mean "
            f"of so many tasks, with its 95 % interval by a paired bootstrap over samples within tasks ({resamples:,} "
            f"resamples, seed {seed}). ≈: not distinguishable from 0 (the interval holds 0, or a task has a single "
            "sample and so no interval)."
        )
    if any(cell["scorer"]["name"] == "knorm" and cell["scorer"].get("window") for cell in cells):
        yield "KNorm with a window is not in the paper: it tells what a protected window does from what the graph does."
    if any(row.printed for row in rows):
        beside = "not comparable with mini; " if facts["data"] == "mini" else ""
        beside += "prompts, cut, stops and edit similarity of its own script, " if facts["protocol"] != "paper" else ""
        yield (
            f"paper: Table 1 of arXiv:2509.00388v1 ({beside}the "
            "budget per query head, k, m and T not published): compare differences, not levels."
        )
    if any(row.entries[AVERAGE].paper and printed_average_differs(row.printed) for row in rows):
        yield "†: the paper's printed average is not the mean of its columns, which Δ is taken from."


def _counts(tasks: Mapping[str, Sequence[str]]) -> str:
    """`200 samples a task (MF-en 150, LCC 500)`."""
    usual = Counter(map(len, tasks.values())).most_common(1)[0][0]
    others = [f"{SHORT[task]} {len(ids)}" for task, ids in tasks.items() if len(ids) != usual]
    noun = "sample" if usual == 1 else "samples"
    return f"{usual} {noun} a task" + (f" ({', '.join(others)})" if others else "")


def _tally(result: ModelResults) -> str:
    """What happened to a model's prompts and results."""
    records = [[cell.records.get(sample, {}) for cell in result.cells] for sample, _ in result.samples]
    truncated = sum(any(record.get("truncated") for record in of_sample) for of_sample in records)
    beyond = sum(any(_overflow(record) for record in of_sample) for of_sample in records)
    failed = sum(record.get("status") == "failed" for of_sample in records for record in of_sample)
    return (
        f"{result.model} ({result.facts['dtype']}): of {len(records)} prompts {truncated} truncated and {beyond} "
        f"beyond the model's positions; of {len(records) * len(result.cells)} results {failed} failed."
    )


def _overflow(record: Mapping[str, Any]) -> bool:
    """Whether prompt and new tokens exceed the model's positions."""
    return (record.get("notes") or {}).get("overflow", 0) > 0
