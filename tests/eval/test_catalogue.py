"""The catalogue: every cell of a folder, whatever state it is in."""

from __future__ import annotations

import json
import math

import pytest
from report_results import cell, failure, record, small, write_cell

from eval.catalogue import Catalogue
from eval.errors import UserError


def test_cells_come_with_what_they_are_and_their_records(tmp_path):
    found = Catalogue.read(small(tmp_path))
    assert [one.folder for one in found.cells] == sorted(one.folder for one in found.cells)
    assert not found.damaged
    by_name = {(one.scorer, one.settings["graphkv"] is not None): one for one in found.cells}
    assert set(by_name) == {("full", False), ("snapkv", False), ("snapkv", True)}
    one = by_name["snapkv", True]
    assert (one.model, one.task, one.settings["budget"]) == ("tiny", "needle", 128)
    assert [one.records()[f"needle-{i}"]["scores"]["overlap"] for i in range(4)] == [0.25, 1.0, 0.0, 0.0]


def test_shards_are_one_cell(tmp_path):
    for number in range(2):
        write_cell(tmp_path, cell(), [record(f"s{number}", 1.0)], shard=(number, 2))
    (one,) = Catalogue.read(tmp_path).cells
    assert set(one.records()) == {"s0", "s1"}


def test_only_what_was_run_alike_is_a_group(tmp_path):
    write_cell(tmp_path, cell(), [record("a", 1.0)])
    write_cell(tmp_path, cell(graph=True), [record("a", 1.0)])
    write_cell(tmp_path, cell(), [record("a", 1.0)], model="other")
    write_cell(tmp_path, cell(), [record("a", 1.0)], of_task={"data": "0ther"})
    write_cell(tmp_path, cell(), [record("a", 1.0)], decode={"mode": "solo"})
    groups = list(Catalogue.read(tmp_path).groups())
    assert [len(group) for group in groups if group[0].model == "other"] == [1]
    assert sorted(len(group) for group in groups if group[0].model == "tiny") == [1, 1, 2]


def test_a_cell_that_was_only_begun_is_no_cell(tmp_path):
    write_cell(tmp_path, cell(), [])
    folder = write_cell(tmp_path, cell("knorm"), [])
    (folder / "manifest.json").unlink()
    (folder / "records.jsonl").unlink()
    found = Catalogue.read(tmp_path)
    assert [one.scorer for one in found.cells] == ["snapkv"] and found.cells[0].records() == {}
    assert not found.damaged


def changed(path, **values):
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | values))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: path.write_text("{"), "is damaged"),
        (lambda path: path.write_text("[]"), "is damaged"),
        (lambda path: path.write_bytes(b'{"key": "\xff"}'), "is damaged"),
        (lambda path: path.unlink(), "no manifest.json says what they are"),
        (lambda path: changed(path, key="0" * 64), "its key does not belong to its identity"),
        (lambda path: changed(path, identity={"schema": 99}), "schema 99"),
        (lambda path: changed(path, runs=["x"]), "runs are JSON objects"),
    ],
)
def test_a_damaged_manifest_is_one_sentence_and_costs_nothing_else(tmp_path, harm, reason):
    small(tmp_path)
    folder = write_cell(tmp_path, cell("knorm"), [record("a", 1.0)])
    harm(folder / "manifest.json")
    found = Catalogue.read(tmp_path)
    assert len(found.cells) == 3
    (damaged,) = found.damaged
    assert damaged.folder == folder and reason in damaged.reason and "\n" not in damaged.reason


def test_an_identity_that_names_no_scorer_is_damaged(tmp_path):
    write_cell(tmp_path, {"scorer": {"name": "a"}, "budget": 1, "graphkv": None}, [])
    settings = cell()
    del settings["budget"]
    write_cell(tmp_path, settings, [])
    found = Catalogue.read(tmp_path)
    assert len(found.cells) == 1
    assert "does not say cell.budget" in found.damaged[0].reason


@pytest.mark.parametrize(
    "harm",
    [
        {"kept": None},
        {"kept": []},
        {"kept": ["many"]},
        {"bytes": "2"},
        {"n_prompt": 0},
        {"seconds": [1]},
        {"scores": {"overlap": math.nan}},
        {"scores": {"overlap": None}},
        {"text": 5},
    ],
)
def test_records_without_usable_numbers_are_refused_by_name(tmp_path, harm):
    folder = write_cell(tmp_path, cell(), [record("good", 1.0)])
    with (folder / "records.jsonl").open("a") as stream:
        stream.write(json.dumps(record("bad one", 1.0) | harm) + "\n")
    (one,) = Catalogue.read(tmp_path).cells
    with pytest.raises(UserError, match="sample bad one of .* is damaged"):
        one.records()


def test_a_failed_record_needs_no_numbers(tmp_path):
    write_cell(tmp_path, cell(), [failure("a")])
    (one,) = Catalogue.read(tmp_path).cells
    assert one.records()["a"]["status"] == "failed"


def test_a_missing_folder_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        Catalogue.read(tmp_path / "nowhere")
