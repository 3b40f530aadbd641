"""The files of a study: figures or tables, the numbers in them, and what made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval.errors import UserError
from eval.records import key_of, write_atomically
from graphkv.config import CellSettings, RunConfig
from graphkv.models import ModelInfo
from graphkv.provenance import describe_code


@dataclass(frozen=True)
class Output:
    """Where the files of one figure or table go.

    Attributes
    ----------
    stem
        Path without suffix: name of the run, model, and a hash of `settings`.
    settings
        Everything that decides what the files show, as JSON values.
    """

    stem: Path
    settings: Mapping[str, Any]

    def csv(self, frame: pd.DataFrame, part: str = "") -> Path:
        """Write numbers, all digits of them, to `<stem>[-<part>].csv`."""
        return self._write(frame.to_csv(index=False), f"-{part}.csv" if part else ".csv")

    def text(self, text: str, suffix: str) -> Path:
        """Write a text to `<stem><suffix>`."""
        return self._write(text, suffix)

    def facts(self, **numbers: Any) -> Path:
        """Write `<stem>.json`: settings, code and machine, and the `numbers` that a caption mentions."""
        facts = {"settings": self.settings, "code": describe_code(), **numbers}
        return self._write(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", ".json")

    def _write(self, text: str, suffix: str) -> Path:
        path = self.stem.with_name(self.stem.name + suffix)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            raise UserError(f"cannot write results to {path.parent}: {error.strerror}") from error
        return path


def output(
    config: RunConfig, info: ModelInfo, kind: str, cells: Sequence[CellSettings], prompts: Sequence[Sequence[int]]
) -> Output:
    """Name the files of a study.

    Parameters
    ----------
    config
        The run; its `study`, `prefill` and `model` are part of the settings.
    info
        The model, whose weights are.
    kind
        `figures` or `tables`: the folder below `results_dir`.
    cells
        What is shown.
    prompts
        The token ids of each prompt that was read.
    """
    settings = {
        "study": dict(config.study),
        "model": {**asdict(config.model), "weights": info.weights_hash, "device": info.device},
        "prefill": asdict(config.prefill),
        "cells": [cell.describe() for cell in cells],
        "prompts": [{"tokens": len(ids), "sha256": _sha256(ids)} for ids in prompts],
    }
    name = f"{config.name}-{config.model.label}-{key_of(settings)[:8]}"
    return Output(Path(config.results_dir) / kind / name, settings)


def _sha256(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
