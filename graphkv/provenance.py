"""What produced a result: code, versions, machine."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from eval.records import key_of
from graphkv.work import Group

_PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "rouge-score", "fuzzywuzzy")


@cache
def describe_code() -> dict[str, Any]:
    """Git commit and whether the tree differs from it, package versions, Python and machine; JSON values."""
    return {
        **_git(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
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
