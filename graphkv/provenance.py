"""What produced a result: code, versions, machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from eval.errors import UserError
from eval.records import key_of
from graphkv.work import Group

_PACKAGES = ("graphkv", "torch", "transformers", "tokenizers", "datasets", "numpy", "rouge-score", "fuzzywuzzy")
_MATTERS = ("graphkv", "torch", "transformers", "tokenizers")
"""Packages that the records of one table must share; what else results depend on is in a cell's key."""


@cache
def describe_code() -> dict[str, Any]:
    """Git commit and whether the tree differs from it, package versions, Python and machine; JSON values."""
    return {
        **_git(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def describe_run(group: Group) -> dict[str, Any]:
    """What is about to produce records: code, machine, model revision and the settings that cells share; JSON values.

    `run` is a short hash of the rest, which the records name.
    """
    config = group.config
    settings = {
        "model": asdict(config.model),
        "task": dict(config.task),
        "protocol": dict(config.protocol),
        "decode": asdict(config.decode),
        "prefill": asdict(config.prefill),
        "limit": config.limit,
        "partial": config.partial,
    }
    made_by = {**describe_code(), "config": settings}
    return {"run": key_of(made_by)[:8], **made_by}


def check_alike(groups: Sequence[Group], force: bool = False, installed: bool = False) -> None:
    """Refuse to show records together that different versions made; say it where they come from several commits.

    Parameters
    ----------
    groups
        What is shown in one table or figure, its records read.
    force
        Say it instead of refusing.
    installed
        More records are about to be made, by the packages that are installed.

    Raises
    ------
    UserError
        The message has the versions and how many records each made.
    """
    made_by = [run for group in groups for run in _runs_of(group)]
    for name in _MATTERS:
        versions = Counter(run.get("packages", {}).get(name) for run in made_by)
        if installed:
            versions[describe_code()["packages"][name]] += 0
        versions.pop(None, None)  # not known
        if len(versions) > 1:
            counts = ", ".join(f"{count} by {name} {version}" for version, count in sorted(versions.items()))
            message = f"results that different versions made are not comparable: {counts}"
            if not force:
                raise UserError(f"{message}; make them anew in another results_dir, or say force=true")
            print(f"warning: {message}", file=sys.stderr)
    if installed:
        return  # commits are said where results are shown
    commits = Counter((run.get("git_commit") or "")[:7] + "+" * bool(run.get("git_dirty")) for run in made_by)
    commits.pop("", None)
    if len(commits) > 1:
        counts = ", ".join(f"{commit} ({count})" for commit, count in sorted(commits.items()))
        print(f"note: these results were made by several commits (+ has changes): {counts}", file=sys.stderr)


def _version(name: str) -> str | None:
    """Version of a package; None where it is not installed, as this project in a checkout on the path."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _runs_of(group: Group) -> Iterator[dict[str, Any]]:
    """For each finished record that is shown, what made it."""
    for cell in range(len(group.cells)):
        for sample in group.task.samples:
            store = group.store(cell, sample)
            if store.done(sample.id):
                yield store.runs.get(store.records[sample.id].get("run"), {})


def _git() -> dict[str, Any]:
    root = Path(__file__).resolve().parents[1]

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = ask("status", "--porcelain", "--untracked-files=no")
    return {"git_commit": ask("rev-parse", "HEAD"), "git_dirty": None if changes is None else bool(changes)}
