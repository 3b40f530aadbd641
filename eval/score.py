"""Official LongBench scores of anybody's predictions: `python -m eval.score FOLDER`.

Prints a table of the tasks with their means, or, for a folder of several methods, one with a line per method.
`eval.predictions` says what FOLDER may hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.averages import BUCKETS, bucket_scores, mean_of_categories, mean_of_tasks, task_score
from eval.errors import UserError
from eval.longbench import ROWS
from eval.metrics import LONGBENCH, METRIC_VERSIONS, TASKS, metric_status, score_row
from eval.predictions import Run, read_runs, unknown_files
from eval.similarity import INSTALLED, SIMILARITIES, Similarity

MISSING = "—"
MEANS = {"mean of 16 tasks": mean_of_tasks, "mean of 6 categories": mean_of_categories}


@dataclass(frozen=True)
class Scores:
    """The scores of one run.

    Attributes
    ----------
    name
        Of the run.
    tasks
        Task → score in 0..100, or for LongBench-E bucket → score, `None` where it has no rows.
    rows
        Task → all scores of each row, as shares of 1, with `metric_status`.
    partial
        Task → the number of rows that LongBench has, where this run has another.
    means
        The means over LongBench's tasks, `None` where a task or a row is missing; no entry for LongBench-E.
    """

    name: str
    tasks: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    partial: dict[str, int]
    means: dict[str, float | None]


def score_run(run: Run, similarity: Similarity, by_length: bool = False) -> Scores:
    """Score all rows and tasks of a run.

    Parameters
    ----------
    run
        Predictions by task.
    similarity
        Back end of the edit similarity.
    by_length
        Score each of LongBench-E's buckets instead of whole tasks.

    Raises
    ------
    UserError
        For a row without usable answers, classes or (with `by_length`) length; says where it was read.
    """
    tasks: dict[str, Any] = {}
    scored: dict[str, list[dict[str, Any]]] = {}
    partial: dict[str, int] = {}
    for task, rows in run.tasks.items():
        scored[task] = []
        for row in rows:
            if by_length and row.length is None:
                raise UserError(f"{row.where}: length is missing, and the buckets of LongBench-E need it")
            try:
                scores = score_row(task, row.prediction, row.answers, row.all_classes, similarity)
            except UserError as error:
                raise UserError(f"{row.where}: {error}") from None
            scored[task].append({**scores, "metric_status": metric_status(task, row.prediction)})
        official = [scores["score"] for scores in scored[task]]
        if by_length:
            tasks[task] = bucket_scores(official, [row.length for row in rows])
        else:
            tasks[task] = task_score(official)
        expected = ROWS.get(f"{task.removesuffix('_e')}_e" if by_length else task, len(rows))
        if len(rows) != expected:
            partial[task] = expected
    whole = {task: score for task, score in tasks.items() if task not in partial}
    means = {} if by_length else {name: mean(whole) for name, mean in MEANS.items()}
    return Scores(run.name, tasks, scored, partial, means)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 after a user's mistake, which is one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m eval.score", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="<task>.jsonl, or <model>_<budget>/<task>/<method>.json")
    parser.add_argument(
        "--similarity",
        choices=SIMILARITIES,
        default="difflib",
        help="edit similarity of the code tasks: difflib (default; official requirements) or levenshtein "
        "(where python-Levenshtein was installed, as KVCache-Factory has it)",
    )
    parser.add_argument("--e", action="store_true", help="LongBench-E: a score per bucket of length")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the scores")
    parser.add_argument("--rows", type=Path, metavar="FILE.jsonl", help="write a line per row")
    options = parser.parse_args(arguments)
    try:
        start = time.perf_counter()
        results = [score_run(run, options.similarity, options.e) for run in read_runs(options.folder)]
        seconds = time.perf_counter() - start
        print(_table(results, options.e))
        print(*_notes(results, options.similarity, unknown_files(options.folder), seconds), sep="\n")
        if options.out:
            _write(options.out, json.dumps(_summary(results, options.similarity), indent=1) + "\n")
        if options.rows:
            _write(options.rows, "".join(_row_lines(results)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _table(results: Sequence[Scores], by_length: bool) -> str:
    """A line per task for one run, a line per run for several."""
    found = {task for result in results for task in result.tasks}
    proper = not by_length and not found.isdisjoint(LONGBENCH)  # all of LongBench is shown, with its means
    shown = [task for task in TASKS if task in found or (proper and task in LONGBENCH)]
    if len(results) == 1:
        (result,) = results
        lines = [["task", "n", *(BUCKETS if by_length else ["score"])]]
        for task in shown:
            n = str(len(result.rows[task])) if task in result.rows else MISSING
            lines.append([task, n, *_cells(result.tasks.get(task))])
        if proper:
            lines += [[name, "", *_cells(mean)] for name, mean in result.means.items()]
    else:
        lines = [["run", *shown, *(MEANS if proper else [])]]
        for result in results:
            cells = [result.tasks.get(task) for task in shown] + (list(result.means.values()) if proper else [])
            lines.append([result.name, *(" / ".join(_cells(cell)) for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        line[0].ljust(widths[0]) + "".join(f"  {c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )


def _cells(score: float | Mapping[str, float | None] | None) -> list[str]:
    """The score or scores as a table shows them."""
    values = score.values() if isinstance(score, Mapping) else [score]
    return [MISSING if value is None else f"{value:.2f}" for value in values]


def _notes(results: Sequence[Scores], similarity: Similarity, unknown: Sequence[str], seconds: float) -> list[str]:
    """What a reader must know to compare the table with another one."""
    by = "by fuzzywuzzy" if similarity == INSTALLED else "by fuzzywuzzy's rules"
    versions = ", ".join(f"{name} {version}" for name, version in METRIC_VERSIONS.items())
    notes = [f"edit similarity: {similarity}, computed {by}", f"metric versions: {versions}"]
    for result in results:
        if result.partial:
            counts = (f"{task} {len(result.rows[task])} ({n})" for task, n in result.partial.items())
            without = ", and so no means" if result.means else ""
            notes.append(f"{result.name}: not LongBench's number of rows{without}: {', '.join(counts)}")
    if unknown:
        notes.append(f"not scored: {', '.join(unknown)}")
    n_rows = sum(len(rows) for result in results for rows in result.rows.values())
    return [*notes, f"{n_rows} rows in {seconds:.1f} s"]


def _summary(results: Sequence[Scores], similarity: Similarity) -> dict[str, Any]:
    """The content of `--out`: `scores` is task → score, or run → task → score where there are several."""
    of_run = {
        result.name: {
            "scores": result.tasks,
            "n": {task: len(rows) for task, rows in result.rows.items()},
            "means": result.means,
        }
        for result in results
    }
    (first, *others) = of_run.values()
    found = {key: {name: run[key] for name, run in of_run.items()} for key in first} if others else first
    return {**found, "similarity": similarity, "metric_versions": METRIC_VERSIONS}


def _row_lines(results: Sequence[Scores]) -> list[str]:
    """The lines of `--rows`; `index` counts the rows of a task from 0."""
    return [
        json.dumps({"run": result.name, "task": task, "index": index, **scores}) + "\n"
        for result in results
        for task, rows in result.rows.items()
        for index, scores in enumerate(rows)
    ]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
