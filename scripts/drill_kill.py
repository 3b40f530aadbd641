"""Kill a sweep at random moments, run it to the end, and hold its records to those of an undisturbed run.

    python scripts/drill_kill.py [--kills 20] [--model tiny|smollm2] [--seed 0]

Each attempt is a process of its own, `python run.py -m …`, that gets SIGKILL: during start-up, a random time after some
samples were finished (so in a prefill, a selection or a decode), just when a records file grows, and at last while
the tables and figures are made. A kill of kind `tearing` also cuts the line that was written last, as a power failure
does. The command is started again after each kill. Every line of every records file is then read. Exit code 1 if a
record is lost, there twice, or differs in more than times and batches.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
CELLS = ["scorer=snapkv,pyramidkv", "+graphkv=on,off", "budget=64,128"]
VOLATILE = ("seconds", "run", "decode_batch", "shared_with")  # what an interruption may change in a record
PAUSE = 0.002  # seconds between two looks at the log and the files

# How a run's log tells where it is.
BEGUN, ENDED = "samples to do", "\nmodel "


class Process(Protocol):
    """What of `subprocess.Popen` the drill uses."""

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self) -> int:
        """Exit code, once it has ended."""


Start = Callable[[Sequence[str], Path], Process]
"""Starts the command with some arguments; what it says goes to a file."""


def start_process(arguments: Sequence[str], log: Path) -> Process:
    """`python run.py` with `arguments`."""
    with log.open("wb") as stream:
        return subprocess.Popen([sys.executable, "run.py", *arguments], cwd=ROOT, stdout=stream, stderr=stream)


@dataclass(frozen=True)
class Pace:
    """Seconds that an undisturbed run takes for its start-up, for a sample, and for tables and figures."""

    startup: float
    sample: float
    report: float


@dataclass(frozen=True)
class Moment:
    """When a process is killed.

    Attributes
    ----------
    kind
        `start-up`; `work`, in the middle of a sample; `writing` or `tearing`, when a records file grows; `report`.
    samples
        How many samples it may finish before; not for `start-up` and `report`.
    share
        In [0, 1): how long to wait then, as a share of what a phase takes; how much of the last line is torn off.
    """

    kind: str
    samples: int
    share: float


def moments(kills: int, seed: int) -> Iterator[Moment]:
    """Where the kills fall: kinds take turns, the rest is random; the last one comes when all samples are done."""
    chance = random.Random(seed)
    for kind in [*islice(cycle(("work", "writing", "start-up", "tearing", "work")), kills - 1), "report"]:
        yield Moment(kind, chance.randrange(3), chance.random())


class Run:
    """One attempt: a process, its log, and the records files that it writes.

    Parameters
    ----------
    start
        How the process is started.
    arguments
        Of `run.py`.
    results
        Its `results_dir`.
    log
        File for what it says.
    """

    def __init__(self, start: Start, arguments: Sequence[str], results: Path, log: Path) -> None:
        self.results, self.log = results, log
        self.process = start([*arguments, f"results_dir={results}"], log)
        self.begin = time.monotonic()

    @property
    def said(self) -> str:
        """Everything that it has said so far."""
        return self.log.read_text(encoding="utf-8")

    @property
    def where(self) -> str:
        """`before`, `within` or `after` the work on its samples."""
        if BEGUN not in self.said:
            return "before"
        return "after" if ENDED in self.said else "within"

    @property
    def samples(self) -> int:
        """How many samples it has finished."""
        return self.said.count("\n[")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds or the process has ended."""
        while not condition() and self.process.poll() is None:
            time.sleep(PAUSE)

    def sizes(self) -> dict[Path, int]:
        """Bytes of each records file."""
        return {path: path.stat().st_size for path in self.results.rglob("records*.jsonl")}

    def kill_at(self, moment: Moment, pace: Pace) -> None:
        """Kill the process at a moment.

        Raises
        ------
        RuntimeError
            If the process ends before.
        """
        writing, before = moment.kind in ("writing", "tearing"), {}
        if moment.kind == "start-up":
            late = self.begin + moment.share * pace.startup  # or less, where files are in memory by now
            self.wait_for(lambda: time.monotonic() >= late or self.where != "before")
        elif moment.kind == "report":
            self.wait_for(lambda: self.where == "after")
            time.sleep(moment.share * pace.report / 4)
        else:
            self.wait_for(lambda: self.where == "within" and self.samples >= moment.samples)
            before = self.sizes()
            if writing:
                self.wait_for(lambda: self.sizes() != before)
            else:
                time.sleep(moment.share * pace.sample)
        if self.process.poll() is not None:
            raise RuntimeError(f"the command ended before it could be killed ({moment}):\n{self.said}")
        self.process.kill()
        self.process.wait()
        if moment.kind == "tearing":
            tear(next(path for path, size in self.sizes().items() if size != before.get(path)), moment.share)

    def end(self) -> Pace:
        """Let the process end; how long its parts took.

        Raises
        ------
        RuntimeError
            If its exit code is not 0.
        """
        self.wait_for(lambda: BEGUN in self.said)
        startup = time.monotonic() - self.begin
        self.wait_for(lambda: ENDED in self.said)
        worked = time.monotonic() - self.begin - startup
        if self.process.wait():
            raise RuntimeError(f"the command failed:\n{self.said}")
        report = time.monotonic() - self.begin - startup - worked
        return Pace(startup, worked / max(1, self.samples), report)


def tear(path: Path, share: float) -> None:
    """Cut some bytes off a file's last line."""
    data = path.read_bytes()
    last = len(data) - (data[:-1].rfind(b"\n") + 1)
    with path.open("r+b") as stream:
        stream.truncate(len(data) - 1 - int(share * (last - 1)))


def records(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(cell's folder, sample) → what every line of every records file says of it, without the volatile fields."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.rglob("records*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            record = json.loads(line)
            lasting = {name: value for name, value in record.items() if name not in VOLATILE}
            found.setdefault((str(path.parent.relative_to(folder)), record["sample"]), []).append(lasting)
    return found


def compare(undisturbed: Path, disturbed: Path) -> dict[str, int]:
    """How many records of one results folder are lost, repeated or different in the other."""
    expected, found = records(undisturbed), records(disturbed)
    return {
        "lost": len(expected.keys() - found.keys()),
        "repeated": sum(len(lines) - 1 for lines in found.values()),
        "differing": sum(lines != expected.get(key) for key, lines in found.items() if len(lines) == 1),
    }


def command(kills: int, model: str) -> list[str]:
    """Arguments of a sweep with four samples a kill, of which a killed process finishes at most three."""
    depths = ",".join(f"{100 * i / (2 * kills):.5g}" for i in range(2 * kills))
    return [
        "-m",
        f"model={model}",
        *CELLS,
        "task.lengths=[400,500]",
        f"task.depths=[{depths}]",
        "task.max_new_tokens=8",
    ]


def drill(arguments: Sequence[str], kills: int, folder: Path, seed: int = 0, start: Start = start_process) -> Counter:
    """Run the command undisturbed and with kills, both below `folder`; print each kill.

    Returns
    -------
    Counter
        What `compare` counts; `kills`; and how many of them came `before`, `within` and `after` the work.
    """
    pace = Run(start, arguments, folder / "undisturbed", folder / "undisturbed.log").end()
    print(f"undisturbed: {pace.startup:.1f} s of start-up, {pace.sample:.2f} s a sample", flush=True)
    counts = Counter(kills=0, before=0, within=0, after=0)
    for moment in moments(kills, seed):
        run = Run(start, arguments, folder / "killed", folder / f"kill-{counts['kills']}.log")
        run.kill_at(moment, pace)
        counts.update(("kills", run.where))
        print(f"kill {counts['kills']}, {moment.kind}: {run.where} the work, {run.samples} samples done", flush=True)
    Run(start, arguments, folder / "killed", folder / "last.log").end()
    counts.update(compare(folder / "undisturbed", folder / "killed"))
    return counts


def main() -> int:
    """Run the drill and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", default="tiny", help="a file of conf/model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.kills < 1:
        parser.error("--kills must be 1 or more")
    with tempfile.TemporaryDirectory(prefix="graphkv-drill-") as temporary:
        folder = Path(temporary)
        counts = drill(command(options.kills, options.model), options.kills, folder, options.seed)
        found = records(folder / "undisturbed")
    print(f"{counts['before']} kills before the work, {counts['within']} within, {counts['after']} after it")
    print(f"{len(found)} records of {len({cell for cell, _ in found})} cells")
    wrong = {name: counts[name] for name in ("lost", "repeated", "differing")}
    samples = len({sample for _, sample in found})
    print(f"kills={counts['kills']} samples={samples}", *(f"{name}={count}" for name, count in wrong.items()))
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
