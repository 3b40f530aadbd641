"""A sweep of 24 cells as one command, against one command a cell, and against kvpress once a cell.

    python scripts/bench_grid.py [--prompts 3] [--length 2000] [--tokens 64] [--budgets 96 …] [--repeat 3]

Every contestant is timed as a user meets it, as processes that begin with nothing loaded, on the same needle prompts,
with stop tokens off and torch's default threads. They take turns: the sweep comes first, last and in between, the
cells one by one. *Total* is from the start of the processes to their end; *work* leaves out imports, the loading of
the model, and tables and figures. The last line is of totals.

kvpress 0.5.5 runs in a virtual environment of its own, which is made once (--venv): it needs transformers < 5.3. It
has no graph, so a cell with one is run there without it; its PyramidKV falls back to SnapKV at small budgets. Its
press sees the prompt but for the last token, so it evicts knowing the question, as ours does.

The limit of a sweep is one prefill a prompt, at the speed that was measured, and its weights read once a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_decode import weight_read_seconds

from eval import needle
from eval.errors import UserError
from graphkv.embedded import cache_folder
from graphkv.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
KVPRESS = ["kvpress==0.5.5", "transformers<5.3", f"torch=={torch.__version__.split('+')[0]}"]
PRESSES = {"snapkv": "SnapKVPress", "pyramidkv": "PyramidKVPress"}
GRAPHS = ("off", "on")


@dataclass(frozen=True)
class Setting:
    """One cell as words of the command line."""

    scorer: str
    graph: str
    budget: int

    @property
    def label(self) -> str:
        """Short name."""
        return f"{self.scorer}-{self.budget}{'+graphkv' if self.graph == 'on' else ''}"


@dataclass(frozen=True)
class Timing:
    """Wall seconds of a process, and of the parts of its work by name."""

    total: float
    parts: dict[str, float]

    @property
    def work(self) -> float:
        """Seconds without imports, loading, tables and figures."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        return f"{self.total:.1f} s, {self.work:.1f} s of it work"


def run(command: Sequence[str], text: str | None = None) -> tuple[float, subprocess.CompletedProcess]:
    """Run a process in the project's folder: wall seconds, and what it said.

    Raises
    ------
    UserError
        If it fails.
    """
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise UserError(f"`{' '.join(command[:3])} …` failed: {(done.stderr or done.stdout).strip()[-2000:]}")
    return seconds, done


def run_ours(task: dict, scorers: Sequence[str], graphs: Sequence[str], budgets: Sequence[int]) -> Timing:
    """`python run.py -m` over all combinations, in a fresh results folder."""
    choices = [f"scorer={_list(scorers)}", f"+graphkv={_list(graphs)}", f"budget={_list(budgets)}"]
    options = [f"task.{name}={json.dumps(value).replace(' ', '')}" for name, value in task.items()]
    with tempfile.TemporaryDirectory() as folder:
        seconds, done = run([sys.executable, "run.py", "-m", *choices, *options, f"results_dir={folder}"])
    (line,) = re.findall(r"^model .*$", done.stderr, re.MULTILINE)
    parts = {name: float(value) for name, value in re.findall(r"(\w+) (-?[\d.]+) s", line)}
    del parts["model"]
    return Timing(seconds, parts)


def _list(values: Sequence[object]) -> str:
    return ",".join(map(str, values))


def run_kvpress(python: Path, model: Path, prompts: Sequence[Sequence[int]], tokens: int, cell: Setting) -> Timing:
    """One cell in kvpress' own environment."""
    asked = {"model": str(model), "press": PRESSES[cell.scorer], "budget": cell.budget, "tokens": tokens}
    command = [str(python), "scripts/bench_kvpress.py"]
    seconds, done = run(command, json.dumps({**asked, "prompts": prompts}))
    told = json.loads(done.stdout)
    if round(statistics.mean(told["kept"])) != cell.budget:
        raise UserError(f"kvpress kept {told['kept']} tokens a layer, not {cell.budget}")
    return Timing(seconds, {"prompts": sum(told["prompts"])})


def kvpress_python(folder: Path) -> Path:
    """The interpreter of kvpress' environment, which is made if it is not there."""
    python, ready = folder / "bin/python", folder / "ready"
    if not ready.is_file():
        print(f"making {folder} with {', '.join(KVPRESS)}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        run([str(python), "-m", "pip", "install", "--quiet", *KVPRESS])
        ready.touch()
    return python


def report(sweeps: Sequence[Timing], ours: Sequence[Timing], kvpress: Sequence[Timing], limit: float) -> None:
    """Print the table, where the time of the sweep goes, and the last line."""
    sweep = sorted(sweeps, key=lambda timing: timing.total)[len(sweeps) // 2]
    rows = {"one sweep": (sweep.total, sweep.work), "limit: prefill, weights a step": (limit, limit)}
    for name, timings in (("a command a cell", ours), ("kvpress, a process a cell", kvpress)):
        rows[name] = sum(timing.total for timing in timings), sum(timing.work for timing in timings)
    print(f"\n{'seconds':32}{'total':>9}{'x sweep':>9}{'work':>9}{'x sweep':>9}")
    for name, (total, work) in rows.items():
        print(f"{name:32}{total:9.1f}{total / sweep.total:9.2f}{work:9.1f}{work / sweep.work:9.2f}")

    parts = {name: sweep.parts[name] for name in ("prefill", "selection", "decode")}
    parts["everything else"] = sweep.total - sum(parts.values())
    shares = (f"{name} {seconds:.1f} s ({seconds / sweep.total:.0%})" for name, seconds in parts.items())
    print(f"the sweep's wall time: {', '.join(shares)}")
    ratios = [rows[name][0] / sweep.total for name in ("kvpress, a process a cell", "a command a cell")]
    print(f"ratio_kvpress={ratios[0]:.2f} ratio_sequential={ratios[1]:.2f} share_of_limit={limit / sweep.total:.3f}")


def take_turns(options: argparse.Namespace, engine: Engine, python: Path) -> tuple[list[Timing], ...]:
    """Timings of the sweeps, of our cells one by one, and of kvpress' cells."""
    depths = [100 * i // max(1, options.prompts - 1) for i in range(options.prompts)]
    task = {"lengths": [options.length], "depths": depths, "max_new_tokens": options.tokens, "stop": False}
    built = needle.build({"name": "needle", **task}, engine.tokenizer, engine.info.max_positions)
    prompts = [built.encode(sample).ids for sample in built.samples]
    cells = [Setting(*each) for each in itertools.product(options.scorers, GRAPHS, options.budgets)]
    print(f"smollm2: {len(cells)} cells, {len(prompts)} prompts of {options.length} tokens, {options.tokens} new ones")

    sweeps, ours, kvpress = [], [], []
    turns = [round(i * len(cells) / max(1, options.repeat - 1)) for i in range(options.repeat)]
    for number, cell in enumerate([*cells, None]):
        for _ in range(turns.count(number)):
            sweeps.append(run_ours(task, options.scorers, GRAPHS, options.budgets))
            print(f"sweep: {sweeps[-1]}", flush=True)
        if cell is not None:
            ours.append(run_ours(task, [cell.scorer], [cell.graph], [cell.budget]))
            kvpress.append(run_kvpress(python, engine.info.folder, prompts, options.tokens, cell))
            place = f"[{number + 1}/{len(cells)}] {cell.label}"
            print(f"{place}: ours {ours[-1]}; kvpress {kvpress[-1]}", flush=True)
    return sweeps, ours, kvpress


def compare(options: argparse.Namespace) -> None:
    """Run the comparison and print it."""
    python = kvpress_python(options.venv.expanduser())
    engine = Engine.from_pretrained("smollm2")
    sweeps, ours, kvpress = take_turns(options, engine, python)
    read, size = weight_read_seconds(engine.model, 5)
    prefill = statistics.median(timing.parts["prefill"] for timing in sweeps)
    limit = prefill + options.prompts * (options.tokens - 1) * read
    print(f"weights: {size / 1e6:.0f} MB, read once in {read * 1e3:.1f} ms; prefill of all prompts {prefill:.1f} s")
    report(sweeps, ours, kvpress, limit)


def main() -> int:
    """Read the options; exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3, help="prompts, with the needle at as many depths")
    parser.add_argument("--length", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of an answer")
    parser.add_argument("--scorers", nargs="+", default=list(PRESSES), choices=PRESSES)
    parser.add_argument("--budgets", type=int, nargs="+", default=[96, 128, 192, 256, 384, 512])
    parser.add_argument("--repeat", type=int, default=3, help="how often the sweep is run; the median counts")
    parser.add_argument("--venv", type=Path, default=cache_folder() / "kvpress-0.5.5", help="kvpress' environment")
    options = parser.parse_args()

    try:
        compare(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
