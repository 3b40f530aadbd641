"""Look after results: `python -m eval.results status|verify|export|gc`.

`status` shows what is there, `verify` checks every record, `export` writes all of them as one tidy table, and `gc`
removes what it is told to, after asking. Each reads the folder `results`, or the one that is named.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from eval import tidy
from eval.cells import CellFolder, read_folder
from eval.errors import UserError
from eval.records import PART, SCHEMA, cell_folders, remove_cell
from eval.tables import MISSING, as_text

Condition = Callable[[CellFolder], bool]

FIELDS = tuple(CellFolder(Path()).facts)
"""What `gc --where` may ask for."""
_OLD = 3600  # seconds after which nobody is still writing a file
_CONDITIONS: Mapping[str, tuple[str, Condition]] = {
    "unfinished": (
        "cells without a finished sample and without problems",
        lambda cell: not cell.finished and not cell.problems,
    ),
    "unknown-schema": (
        f"cells of another version, whose schema is not {SCHEMA}",
        lambda cell: cell.schema not in (None, SCHEMA),
    ),
}
_GC = """\
Removes the cells that meet all conditions given, and with --parts what killed
processes left of files that they were writing. Without a condition nothing is
removed. What is to go is listed before the question.

A cell that a running process writes is never removed. What was removed is
computed again when an experiment asks for it.

Exit code: 0 when all of it was removed or the answer was no; 1 when some of it
could not be removed; 2 when there is no terminal to ask on and no --yes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is 2 after a user's mistake, which is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        if not options.folder.is_dir():
            raise UserError(f"{options.folder} is not a folder")
        return options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval.results", description=__doc__.split("\n\n")[1])
    commands = parser.add_subparsers(metavar="status|verify|export|gc", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str, more: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=more, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        added.set_defaults(command=command)
        return added

    status = add("status", _status, "a line a cell", "A line a cell, and what all of them hold.")
    verify = add(
        "verify", _verify, "check every record", "Checks all records and manifests; exit code 1 for a problem."
    )
    export = add("export", _export, "write one tidy table", tidy.__doc__)
    export.add_argument("file", metavar="FILE", type=Path, help="FILE.csv or FILE.parquet")
    gc = add("gc", _gc, "remove cells", _GC)
    for name, (text, _) in _CONDITIONS.items():
        gc.add_argument(f"--{name}", dest="conditions", action="append_const", const=name, default=[], help=text)
    gc.add_argument(
        "--where", metavar="FIELD=VALUE", action="append", default=[], help=f"FIELD is {', '.join(FIELDS)}; repeatable"
    )
    gc.add_argument("--parts", action="store_true", help="files that killed processes left half written")
    gc.add_argument("--yes", action="store_true", help="do not ask")
    for command in (status, verify, export, gc):
        command.add_argument(
            "folder", metavar="FOLDER", nargs="?", type=Path, default=Path("results"), help="default: %(default)s"
        )
    return parser


def _cells(folder: Path) -> Iterator[CellFolder]:
    return map(read_folder, cell_folders(folder))


# status, verify, export -----------------------------------------------------------------------------------------


def _status(options: argparse.Namespace) -> int:
    rows, counts = [], dict.fromkeys(["finished", "failed", "torn", "problems", "size"], 0)
    for cell in _cells(options.folder):
        rows.append(_row(cell))
        for name in ("finished", "failed", "torn", "size"):
            counts[name] += getattr(cell, name)
        counts["problems"] += bool(cell.problems)
    if rows:
        print(as_text(pd.DataFrame(rows)), end="\n\n")
    print(
        f"{_count(len(rows), 'cell')} in {options.folder}: {counts['finished']} samples finished, "
        f"{counts['failed']} failed; {counts['torn']} torn; {_size(counts['size'])}"
    )
    if counts["problems"]:
        print(f"{_count(counts['problems'], 'cell')} with problems: python -m eval.results verify {options.folder}")
    return 0


def _row(cell: CellFolder) -> dict[str, str]:
    """A cell's line in a table."""
    facts = {name: MISSING if value is None else value for name, value in cell.facts.items()}
    state = [_count(len(cell.problems), "problem")] if cell.problems else []
    state += ["torn"] if cell.torn else []
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(cell.changed)) if cell.changed else MISSING
    return {
        **{name: facts[name] for name in ("cell", "key", "model", "task", "protocol")},
        "finished": str(cell.finished),
        "failed": str(cell.failed),
        "state": ", ".join(state) or "ok",
        "schema": MISSING if cell.schema is None else str(cell.schema),
        "size": _size(cell.size),
        "last change": changed,
    }


def _verify(options: argparse.Namespace) -> int:
    cells = records = warnings = problems = 0
    for cell in _cells(options.folder):
        for line in [*(f"warning: {warning}" for warning in cell.warnings), *cell.problems]:
            print(line)
        cells, records = cells + 1, records + len(cell.records)
        warnings, problems = warnings + len(cell.warnings), problems + len(cell.problems)
    counts = (_count(n, noun) for n, noun in ((cells, "cell"), (records, "sample"), (warnings, "warning")))
    print(*counts, _count(problems, "problem"), sep=", ")
    return 1 if problems else 0


def _export(options: argparse.Namespace) -> int:
    tidy.check_name(options.file)
    problems = 0

    def sound() -> Iterator[CellFolder]:
        nonlocal problems
        for cell in _cells(options.folder):
            problems += len(cell.problems)
            for warning in cell.warnings:
                print(f"warning: {warning}", file=sys.stderr)
            if not cell.problems:
                yield cell

    table = tidy.tidy(sound())
    if problems:
        raise UserError(
            f"{options.folder} has {_count(problems, 'problem')}, so nothing is exported; "
            f"python -m eval.results verify {options.folder} lists them, and a folder below can be exported alone"
        )
    if table.empty:
        raise UserError(f"there are no records in {options.folder}")
    tidy.write(table, options.file)
    print(f"{options.file}: {_count(len(table), 'row')}, {(table['status'] == 'failed').sum()} of them failed")
    return 0


# gc -------------------------------------------------------------------------------------------------------------


def _gc(options: argparse.Namespace) -> int:
    conditions = [_CONDITIONS[name][1] for name in options.conditions] + list(map(_where, options.where))
    if not conditions and not options.parts:
        return _explain(options.folder)
    rows, folders, size = [], [], 0
    for cell in _cells(options.folder) if conditions else ():
        if all(holds(cell) for holds in conditions):
            rows.append(_row(cell))
            folders.append(cell.path)
            size += cell.size
    files = _stray_files(options.folder) if options.parts else []
    if not folders and not files:
        print("nothing to remove")
        return 0
    if rows:
        print(as_text(pd.DataFrame(rows)), end="\n\n")
    for file in files:
        print(file)
        size += file.stat().st_size
    nouns = ((folders, "folder"), (files, "file"))
    amount = f"{' and '.join(_count(len(found), noun) for found, noun in nouns if found)}, {_size(size)}"
    if not (options.yes or _agreed(amount)):
        print("nothing is removed")
        return 0
    kept = [folder for folder in folders if not _removed(folder, conditions)]
    kept += [file for file in files if not _unlinked(file)]
    print(f"{len(folders) + len(files) - len(kept)} removed, {len(kept)} left")
    return 1 if kept else 0


def _explain(folder: Path) -> int:
    """Say what each condition would remove."""
    found = {name: [0, 0] for name in _CONDITIONS}
    for cell in _cells(folder):
        for name, (_, holds) in _CONDITIONS.items():
            if holds(cell):
                found[name][0] += 1
                found[name][1] += cell.size
    print("nothing is removed without a condition, and this is what there is:")
    for name, (text, _) in _CONDITIONS.items():
        print(f"  --{name:<18} {_count(found[name][0], 'folder')}, {_size(found[name][1])}: {text}")
    print(f"  --{'parts':<18} {_count(len(_stray_files(folder)), 'file')} that killed processes left half written")
    print(f"  --{'where FIELD=VALUE':<18} cells by {', '.join(FIELDS)}")
    return 0


def _where(text: str) -> Condition:
    """The condition of `--where FIELD=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals or name not in FIELDS:
        raise UserError(f"--where {text}: must be FIELD=VALUE, and FIELD one of {', '.join(FIELDS)}")
    return lambda cell: cell.facts[name] is not None and str(cell.facts[name]) == value


def _stray_files(folder: Path) -> list[Path]:
    """Files that a killed process was writing: one that is still written was changed a moment ago."""
    limit = time.time() - _OLD
    found = folder.rglob(f"*.[0-9]*{PART}")
    return sorted(path for path in found if path.is_file() and path.stat().st_mtime < limit)


def _agreed(amount: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError(f"{amount}: nothing is removed, as there is no terminal to ask on and no --yes")
    try:
        return input(f"remove {amount}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _removed(folder: Path, conditions: Sequence[Condition]) -> bool:
    """Remove a cell, or say why not."""
    try:
        if not all(holds(read_folder(folder)) for holds in conditions):
            print(f"left: {folder} has changed meanwhile", file=sys.stderr)
        elif remove_cell(folder):
            return True
        else:
            print(f"left: {folder} is written by a running process", file=sys.stderr)
    except OSError as error:
        print(f"left: {error.filename or folder}: {error.strerror}", file=sys.stderr)
    return False


def _unlinked(file: Path) -> bool:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        print(f"left: {file}: {error.strerror}", file=sys.stderr)
        return False
    return True


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes >= 2**20 else f"{n_bytes / 2**10:.1f} KiB"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # verify | head
    sys.exit(main())
