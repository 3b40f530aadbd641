"""The command `python run.py`, inside this process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

import run as entry


@dataclass
class Done:
    """How a command went."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def files(self) -> dict[str, Path]:
        """The files that a study named, by what follows the stem: `.png`, `-means.csv`, …"""
        paths = [Path(line) for line in self.stdout.splitlines() if line.startswith("/")]
        stem = next(path for path in paths if path.suffix == ".json").with_suffix("")
        return {str(path).removeprefix(str(stem)): path for path in paths}


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command on the tiny model."""

    def call(*arguments: str, results: Path) -> Done:
        argv = ["run.py", *arguments, "model=tiny", f"results_dir={results}"]
        monkeypatch.setattr(sys, "argv", argv)
        capfd.readouterr()
        code = 0
        try:
            entry.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        finally:
            GlobalHydra.instance().clear()
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return call
