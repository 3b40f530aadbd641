"""What README and docs say works: the Python example runs, commands compose, targets exist, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from graphkv.config import CONF, parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path: path.read_text(encoding="utf-8") for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
}
README = PAGES[ROOT / "README.md"]
COMMANDS = [line for page in PAGES.values() for line in page.splitlines() if line.startswith("python run.py")]


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
    named = set()
    for page in PAGES.values():
        for line in re.findall(r"^make (.*)$", page, flags=re.M) + re.findall(r"`make ([^`]*)`", page):
            named |= {word for word in shlex.split(line, comments=True) if "=" not in word}
    assert named <= set(targets) and {"demo", "test", "table1", "fidelity", "fig7", "report"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page]):
        assert target.startswith("https://") or (page.parent / target).exists(), target
