"""Our ROUGE-L and edit similarity against the `rouge` and `fuzzywuzzy` packages, on real predictions.

    python scripts/bench_metrics.py [FOLDER] [--limit N]

FOLDER holds one folder of `<task>.jsonl` files per model, by default `../shared/data/longbench_preds`. Prints
CPU time a row, the ratio of the times and the largest difference of a row's score.
Needs `pip install rouge==1.0.1`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eval.errors import UserError
from eval.metrics import TASKS, first_line
from eval.predictions import read_runs
from eval.rouge_l import rouge_l
from eval.similarity import INSTALLED, SIMILARITIES, code_line, fuzz, fuzz_ratio

ROOT = Path(__file__).resolve().parents[1]
PREDICTIONS = Path(os.environ.get("GRAPHKV_SHARED", ROOT.parent / "shared")) / "data/longbench_preds"

TURN = 20  # rows; functions take turns, so that a busy machine slows all of them
Pairs = Sequence[tuple[str, str]]
Metric = Callable[[str, str], float]


def compare(pairs: Pairs, *metrics: Metric) -> tuple[list[float], list[list[float]]]:
    """CPU milliseconds per pair of prediction and reference, and the values, of each metric."""
    seconds = [0.0] * len(metrics)
    values: list[list[float]] = [[] for _ in metrics]
    for first in range(0, len(pairs), TURN):
        for i, metric in enumerate(metrics):
            start = time.process_time()
            values[i] += [metric(*pair) for pair in pairs[first : first + TURN]]
            seconds[i] += time.process_time() - start
    return [1000 * total / len(pairs) for total in seconds], values


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest absolute difference."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def rouge_package(metrics: Sequence[str] | None) -> Metric:
    """ROUGE-L of the package, asked for some of its metrics (`None`: the three that LongBench asks for)."""
    rouge = importlib.import_module("rouge")

    def score(prediction: str, reference: str) -> float:
        try:
            scores = rouge.Rouge(metrics).get_scores([prediction], [reference], avg=True)
        except (ValueError, RecursionError):  # LongBench swallows all exceptions
            return 0.0
        return scores["rouge-l"]["f"]

    return score


def rouge_table(tasks: dict[str, Pairs]) -> list[list[str]]:
    """Lines: each task, then all rows together."""
    lines = [["ROUGE-L, ms a row", "as LongBench", "rouge-l alone", "ours", "ratio", "ratio, alone", "difference"]]
    rows, totals, largest = 0, [0.0] * 3, 0.0
    for task, pairs in tasks.items():
        times, values = compare(pairs, rouge_package(None), rouge_package(["rouge-l"]), rouge_l)
        apart = difference(values[2], values[0])
        lines.append(rouge_line(f"{task}, {len(pairs)} rows", times, apart))
        rows += len(pairs)
        totals = [total + len(pairs) * ms for total, ms in zip(totals, times, strict=True)]
        largest = max(largest, apart)
    return [*lines, rouge_line(f"all {rows} rows", [total / rows for total in totals], largest)]


def rouge_line(name: str, times: Sequence[float], apart: float) -> list[str]:
    """One line of `rouge_table`."""
    called, alone, ours = times
    return [
        name,
        *(f"{ms:.3f}" for ms in times),
        f"{called / ours:.0f}x",
        f"{alone / ours:.0f}x",
        f"{apart:.1e}",
    ]


def similarity_table(tasks: dict[str, dict[str, tuple[Pairs, list[float]]]]) -> list[list[str]]:
    """Lines: each code task with each back end."""
    lines = [
        [
            "Edit similarity, ms a row",
            f"fuzzywuzzy ({INSTALLED})",
            "ours",
            "ratio",
            "difference",
            "to official",
        ]
    ]
    for task, official in tasks.items():
        for name, (pairs, scores) in official.items():
            times, values = compare(pairs, fuzz.ratio, lambda a, b, name=name: fuzz_ratio(a, b, name))
            shares = [[value / 100 for value in column] for column in values]
            apart = f"{difference(shares[1], shares[0]):.1e}" if name == INSTALLED else "other back end"
            lines.append(
                [
                    f"{task}, {name}, {len(pairs)} rows",
                    *(f"{ms:.3f}" for ms in times),
                    f"{times[0] / times[1]:.1f}x",
                    apart,
                    f"{difference(shares[1], scores):.1e}",
                ]
            )
    return lines


def read(folder: Path, limit: int) -> tuple[dict[str, Pairs], dict[str, dict[str, tuple[Pairs, list[float]]]]]:
    """Over all models: task → pairs of summaries; code task → back end → pairs of lines, official scores."""
    summaries: dict[str, Pairs] = {}
    code: dict[str, dict[str, tuple[Pairs, list[float]]]] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        for task, rows in next(read_runs(path)).tasks.items():
            if TASKS[task].metric == "rouge_l":
                seen = first_line if TASKS[task].first_line else str
                summaries.setdefault(task, []).extend((seen(r.prediction), r.answers[0]) for r in rows[:limit])
            elif TASKS[task].metric == "edit_similarity":
                for name in SIMILARITIES:
                    scores = json.loads((path / f"row_scores_official_{name}.json").read_text("utf-8"))
                    pairs, official = code.setdefault(task, {}).setdefault(name, ([], []))
                    pairs.extend((code_line(r.prediction), r.answers[0]) for r in rows)
                    official.extend(scores[task])
    return summaries, code


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=PREDICTIONS)
    parser.add_argument("--limit", type=int, default=20, help="summaries per file (the `rouge` package is slow)")
    options = parser.parse_args()
    try:
        if not options.folder.is_dir():
            raise UserError(f"{options.folder} is not a folder")
        if importlib.util.find_spec("rouge") is None:
            raise UserError("the rouge package is missing: pip install rouge==1.0.1")
        summaries, code = read(options.folder, options.limit)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for lines in (rouge_table(summaries), similarity_table(code)):
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for first, *cells in lines:
            print(
                first.ljust(widths[0]),
                *(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True)),
                sep="  ",
            )
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
