"""What the README says works: its Python example runs, its commands compose."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from graphkv.config import CONF, parse

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for line in README.splitlines() if line.startswith("python run.py")]


def test_the_python_example(smol, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    monkeypatch.setattr("graphkv.Engine.from_pretrained", lambda name: {"smollm2": smol}[name])
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    shape, answers = capsys.readouterr().out.splitlines()
    cell, prefill = names["cell"], names["prefill"]
    assert shape == f"torch.Size([3, 256]) 256.0 {256 * 30 * 3 * 64 * 2 * 4}"
    assert cell.kept[0].tolist() == sorted(map(sorted, cell.kept[0].tolist()), key=cell.kept[0].tolist().index)
    assert "4712" in answers.split("', '")[0]
    assert prefill.n > 256


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(command):
    words = [word for word in shlex.split(command, comments=True)[2:] if word != "-m"]
    first = [re.sub(r"(?<==)([^\[\],]+),.*", r"\1", word) for word in words]  # the first value of each sweep
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert parse(compose("config", overrides=first)).cell.label


def test_every_make_target_that_is_named_exists():
    targets = re.findall(r"^([a-z0-9]+):.*##", (CONF.parent / "Makefile").read_text(), flags=re.M)
    named = set(re.findall(r"make ([a-z0-9]+)", README))
    assert named <= set(targets) and {"demo", "test", "table1"} <= named
