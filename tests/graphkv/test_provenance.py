"""What made a record: results of different versions enter one table only when that is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from eval.errors import UserError
from eval.records import MANIFEST
from graphkv import grid
from graphkv.config import CONF, RunConfig, cell_settings, parse
from graphkv.provenance import check_alike, describe_code
from graphkv.work import groups_of


@pytest.fixture
def configs(tmp_path) -> list[RunConfig]:
    """Two cells, one sample each, on the tiny model."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = ["model=tiny", "task.lengths=[300]", "task.depths=[50]", "task.max_new_tokens=4"]
        base = parse(compose("config", overrides=[*settings, f"results_dir={tmp_path}"]))
    return [replace(base, cell=cell_settings(name, 64)) for name in ("snapkv", "knorm")]


def rewritten(folder: Path, **changes) -> None:
    """The manifest of one cell, as if something else had made its records."""
    path = next(path for path in folder.rglob(MANIFEST) if "knorm" in path.parent.name)
    manifest = json.loads(path.read_text())
    (made_by,) = manifest["runs"]
    made_by |= changes
    path.write_text(json.dumps(manifest))


def test_records_of_another_version_are_refused_unless_forced(configs, tmp_path, capsys):
    assert grid.run(configs) == 0
    versions = describe_code()["packages"]
    assert versions["graphkv"] and versions["torch"]
    capsys.readouterr()
    rewritten(tmp_path, packages={**versions, "transformers": "4.9.9"})
    with pytest.raises(UserError, match=f"1 by transformers 4.9.9, 1 by transformers {versions['transformers']}"):
        grid.run(configs)
    assert grid.run([replace(config, force=True) for config in configs]) == 0
    assert "warning: results that different versions made" in capsys.readouterr().err
    assert grid.run(configs[1:]) == 0  # alone it can be shown


def test_another_version_is_refused_before_more_is_done(configs, tmp_path, capsys):
    assert grid.run(configs[1:]) == 0
    rewritten(tmp_path, packages={**describe_code()["packages"], "torch": "1.9"})
    before = {path: path.read_text() for path in tmp_path.rglob("records*.jsonl")}
    with pytest.raises(UserError, match="1 by torch 1.9"):
        grid.run(configs)
    assert {path: path.read_text() for path in tmp_path.rglob("records*.jsonl") if path.stat().st_size} == before


def test_other_commits_are_said_and_unknown_versions_let_in(configs, tmp_path, capsys):
    assert grid.run(configs) == 0
    rewritten(tmp_path, git_commit="0123456789", git_dirty=True, packages={})
    assert grid.run(configs) == 0
    assert "0123456+ (1)" in capsys.readouterr().err
    assert grid.run([*configs, replace(configs[0], cell=cell_settings("snapkv", 80))]) == 0
    assert capsys.readouterr().err.count("several commits") == 1  # once, though versions are checked twice


def test_packages_that_do_not_matter_may_differ(configs, tmp_path):
    assert grid.run(configs) == 0
    rewritten(tmp_path, packages={**describe_code()["packages"], "numpy": "1.0"})
    groups = groups_of(configs)
    grid.look(groups)
    check_alike(groups)


def test_failed_records_and_those_of_other_samples_do_not_count(configs, tmp_path):
    assert grid.run(configs) == 0
    rewritten(tmp_path, packages={**describe_code()["packages"], "torch": "1.0"})
    (records,) = [path for path in tmp_path.rglob("records.jsonl") if "knorm" in path.parent.name]
    record = json.loads(records.read_text())
    records.write_text(json.dumps({**record, "sample": "another"}) + "\n")
    groups = groups_of(configs)
    grid.look(groups)
    check_alike(groups)
