"""What Table 1 is called: names and order of its rows, its title and its caption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eval.cell_results import CellResult, ModelResults, Tasks, finished
from eval.longbench import ROWS
from eval.metrics import LONGBENCH_E
from eval.paper import printed_average_differs
from eval.tables import MISSING

if TYPE_CHECKING:
    from eval.table1 import Row

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
    "streamingllm": "StreamingLLM",
    "tova": "TOVA",
    "keydiff": "KeyDiff",
    "lagkv": "LagKV",
    "expected_attention": "ExpectedAttention",
    "rkv": "R-KV",
    "spankv": "SpanKV",
    "random": "Random",
    "oracle": "Oracle",
}
"""Names in rows, in the order of rows; others follow under their own."""

_WINDOWED = {"window": 32, "kernel": 7, "pooling": "avg", "group": "mean", "sinks": 0}
USUAL: Mapping[str, Mapping[str, Any]] = {
    "knorm": {"window": 0, "sinks": 0},
    "snapkv": _WINDOWED,
    "pyramidkv": {**_WINDOWED, "beta": 20, "schedule": "official"},
    "spankv": {"widths": [1, 31], "mix": "fixed"},
}
"""Options that a row's name leaves out: those of the paper's code base (`group` is ours, it has no KV heads)."""

_UNSAID: Mapping[str, Any] = {"head_budget": "uniform", "head_floor": None}
"""What goes without saying: of head budgets only those that differ are named."""


def name(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """Scorer and GraphKV, with what sets the row apart: unusual options, and whatever varies between `cells`."""
    scorer = cell["scorer"]
    usual = USUAL.get(scorer["name"], {})
    siblings = [other["scorer"] for other in cells if other["scorer"]["name"] == scorer["name"]]
    parts = {
        option: value
        for option, value in scorer.items()
        if (_json(value) != usual[option] if option in usual else _varies(option, siblings))
    }
    if scorer["name"] != "full":
        parts |= varying_settings(cell, cells)
    name = SCORERS.get(scorer["name"], scorer["name"]) + bracketed(parts)
    if cell["graphkv"] is None:
        return name
    graphs = [other["graphkv"] for other in cells if other["graphkv"] is not None]
    changed = {option: value for option, value in cell["graphkv"].items() if _varies(option, graphs)}
    return f"{name}+GraphKV{bracketed(changed)}"


def _json(value: Any) -> Any:
    """A value as it comes back from JSON."""
    return list(value) if isinstance(value, tuple) else value


def varying_settings(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings of a cell, such as its budget, that are not the same in all of `cells` that have a budget."""
    compressed, shown = _compressed(cells), {}
    for key in _settings(cell):
        having = [other for other in compressed if key in other]
        if key in _UNSAID and cell[key] == _UNSAID[key]:
            continue
        # A bias or selector is named only in cells that have one, and its options where they differ among those.
        if _varies(key, having) or (len(having) < len(compressed) and key in ("bias", "selector")):
            shown[key] = cell[key]
    return shown


def _settings(cell: Mapping[str, Any]) -> list[str]:
    """Keys of a cell beside scorer and graph: budget, granularity."""
    return sorted(cell.keys() - {"scorer", "graphkv"})


def _compressed(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cells that have a budget."""
    return [cell for cell in cells if cell["scorer"]["name"] != "full"]


def _varies(key: str, dicts: Sequence[Mapping[str, Any]]) -> bool:
    return any(other.get(key) != dicts[0].get(key) for other in dicts)


def bracketed(parts: Mapping[str, Any]) -> str:
    """` (rounds 2, edge kv)`; nothing for nothing."""
    return f" ({', '.join(f'{key} {value}'.replace('_', ' ') for key, value in parts.items())})" if parts else ""


def order(cell: Mapping[str, Any]) -> tuple:
    """Sorts cells: scorer, its usual options first, budget, and each row with GraphKV after the one without."""
    name, names = cell["scorer"]["name"], list(SCORERS)
    usual = USUAL.get(name, {})
    options = {key: value for key, value in cell["scorer"].items() if key != "name" and value != usual.get(key)}
    settings = {key: cell[key] for key in _settings(cell)}
    rank = names.index(name) if name in names else len(names)
    return rank, name, _sortable(options), _sortable(settings), _sortable(cell["graphkv"] or {})


def _sortable(values: Mapping[str, Any]) -> list[tuple]:
    """Items that compare although a value may be a number, a text or None."""
    return [(key, value is not None, isinstance(value, str), value) for key, value in sorted(values.items())]


def title(facts: Mapping[str, Any], tasks: Tasks, cells: Sequence[Mapping[str, Any]]) -> str:
    """Number of the table, data and budget."""
    budgets = {cell["budget"] for cell in _compressed(cells)}
    budget = f", budget {amount(*budgets)}" if len(budgets) == 1 else ""
    return f"Table 1. {data(facts, tasks)}{budget}"


def data(facts: Mapping[str, Any], tasks: Tasks) -> str:
    """What the samples are: LongBench only where all of its rows are there."""
    if facts["data"] == "mini":
        return "mini: a test bed, NOT LongBench"
    if any(len(ids) != ROWS[task] for task, ids in tasks.items()):
        return "A part of LongBench's rows"
    return "LongBench"


_FEW = 10  # samples of a task; with 10, a percentile interval of 95 % holds the mean about nine times in ten


def amount(budget: int | float) -> str:
    """A budget with its unit."""
    return f"{budget} tokens a layer" if isinstance(budget, int) else f"{budget:.4g} of the prompt a layer"


def caption(
    results: Sequence[ModelResults],
    tasks: Tasks,
    cells: Sequence[Mapping[str, Any]],
    blocks: Mapping[str, Sequence[Row]],
    resamples: int,
    seed: int,
) -> Iterator[str]:
    """Sentences that say what the numbers are, how they were made, and with what they may be compared."""
    facts = results[0].facts
    rows = [row for block in blocks.values() for row in block]
    yield origin(facts, tasks)
    for result in results:
        yield tally(result)
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
            f"resamples, seed {seed}). {marks('table')}"
        )
        yield from power(row.comparison.detectable for row in rows if row.comparison)
        yield from few(tasks)
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


def origin(facts: Mapping[str, Any], tasks: Tasks) -> str:
    """Where the scores come from: protocol, metric back end, data, numbers of samples."""
    return (
        f"Protocol {facts['protocol']}; edit similarity {facts['similarity']}; data {facts['data']}, "
        f"sha256 {facts['data_hash'][:12]}; {_counts(tasks)}."
    )


def marks(family: str) -> str:
    """What the marks behind a difference say; `family` is what Holm's correction is over."""
    return (
        "≈: not distinguishable from 0 (the interval holds 0, or a task has a single sample and so no interval); "
        "*: the interval excludes 0; **: and an exact sign test over the same samples (ties left out), Holm-corrected "
        f"over the differences of this {family}, has p < 0.05 in the same direction."
    )


def power(detectable: Iterable[float | None]) -> Iterator[str]:
    """The smallest differences, in points, that the samples at hand would show; those without spread are left out."""
    found = sorted(value for value in detectable if value)
    if found:
        ends = " to ".join(dict.fromkeys(f"{value:.2f}" for value in (found[0], found[-1])))
        yield (
            f"With these samples a true difference of {ends} points would be found four times in five (80 % power at "
            "two-sided 5 %, from the standard deviations of the differences)."
        )


def few(tasks: Tasks) -> Iterator[str]:
    """A warning where tasks have so few samples that a bootstrap understates how far they spread."""
    least = min(map(len, tasks.values()))
    if 1 < least < _FEW:
        yield f"A bootstrap over as few as {least} samples a task gives intervals that are too narrow."


def lacking(cell: CellResult, tasks: Tasks) -> str:
    """`HotpotQA 1 of 4 (1 failed)` for each task that lacks samples; empty where none does."""
    parts = []
    for task, ids in tasks.items():
        n = len(ids) - len(finished(cell, ids))
        failed = sum(cell.records.get(sample, {}).get("status") == "failed" for sample in ids)
        if n:
            parts.append(f"{SHORT[task]} {n} of {len(ids)}" + (f" ({failed} failed)" if failed else ""))
    return ", ".join(parts)


def _counts(tasks: Tasks) -> str:
    """`200 samples a task (MF-en 150, LCC 500)`."""
    usual = Counter(map(len, tasks.values())).most_common(1)[0][0]
    others = [f"{SHORT[task]} {len(ids)}" for task, ids in tasks.items() if len(ids) != usual]
    noun = "sample" if usual == 1 else "samples"
    return f"{usual} {noun} a task" + (f" ({', '.join(others)})" if others else "")


def tally(result: ModelResults) -> str:
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
