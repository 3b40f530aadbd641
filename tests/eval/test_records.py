"""The store: every finished record survives, none is there twice, and a torn line is redone."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.errors import UserError
from eval.records import MANIFEST, RECORDS, CellStore, key_of, read_records

IDENTITY = {"model": "m", "cell": {"budget": 64}}


def record(sample: str, **more) -> dict:
    """A finished record."""
    return {"sample": sample, "status": "ok", **more}


def test_records_are_on_disk_at_once_and_come_back(tmp_path):
    with CellStore(tmp_path, "a cell", IDENTITY) as store:
        store.append(record("s1", text="None"))
        on_disk = (store.folder / RECORDS).read_text()
        assert json.loads(on_disk) == record("s1", text="None")
        assert store.done("s1") and not store.done("s2")
    with CellStore(tmp_path, "a cell", IDENTITY) as again:
        assert again.records == {"s1": record("s1", text="None")}


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_dropped_and_redone(tmp_path, capsys, cut):
    with CellStore(tmp_path, "c", IDENTITY) as store:
        store.append(record("s1"))
        store.append(record("s2", text="äöü" * 10))
    path = store.folder / RECORDS
    path.write_bytes(path.read_bytes()[:-cut])
    with CellStore(tmp_path, "c", IDENTITY) as again:
        assert list(again.records) == ["s1"]
        again.append(record("s2"))
    assert "torn last line" in capsys.readouterr().err
    assert list(read_records(path)) == ["s1", "s2"]


def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path):
    path = tmp_path / RECORDS
    path.write_text('{"sample": "a", "status": "ok"}\n{"sam\n{"sample": "b", "status": "ok"}\n')
    with pytest.raises(UserError, match=r"records.jsonl:2 is not a record"):
        read_records(path)


def test_a_sample_finished_twice_is_refused(tmp_path):
    # Case H7.
    path = tmp_path / RECORDS
    path.write_text('{"sample": "a", "status": "ok"}\n' * 2)
    with pytest.raises(UserError, match="repeats sample a"):
        read_records(path)


def test_a_failed_sample_is_tried_again_and_the_success_counts(tmp_path):
    with CellStore(tmp_path, "c", IDENTITY) as store:
        store.append({"sample": "a", "status": "failed", "error": "no room"})
        assert not store.done("a")
        store.append(record("a", text="fine"))
    assert read_records(store.folder / RECORDS)["a"]["text"] == "fine"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.dictionaries(st.text(), v)))
def test_any_change_of_the_identity_changes_the_key(value):
    # Case H9.
    base = {"cell": value, "model": "m"}
    assert key_of(base) == key_of(json.loads(json.dumps(base)))
    assert key_of(base) != key_of({**base, "more": 1})
    assert key_of(base) != key_of({**base, "cell": [value]})


def test_not_a_number_is_refused(tmp_path):
    with CellStore(tmp_path, "c", IDENTITY) as store, pytest.raises(ValueError):
        store.append(record("s", score=float("nan")))


@pytest.mark.parametrize(
    ("manifest", "message"),
    [("{", "damaged"), ('{"identity": {"schema": 99}}', "schema 99"), ('{"identity": {"schema": 1}}', "another cell")],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(tmp_path, manifest, message):
    store = CellStore(tmp_path, "c", IDENTITY)
    store.folder.mkdir(parents=True)
    (store.folder / MANIFEST).write_text(manifest)
    with pytest.raises(UserError, match=message), store:
        pass


def test_the_manifest_lists_each_way_of_making_once(tmp_path):
    with CellStore(tmp_path, "c", IDENTITY) as store:
        for made_by in ({"git_commit": "1"}, {"git_commit": "1"}, {"git_commit": "2"}):
            store.note_run(made_by)
    manifest = json.loads((store.folder / MANIFEST).read_text())
    assert manifest["runs"] == [{"git_commit": "1"}, {"git_commit": "2"}]
    assert manifest["identity"]["cell"] == {"budget": 64}


def _write(folder, samples):
    with CellStore(folder, "c", IDENTITY) as store:
        for sample in samples:
            if not store.done(sample):
                store.append(record(sample, by=os.getpid()))


def test_two_processes_neither_corrupt_nor_repeat(tmp_path):
    context = multiprocessing.get_context("spawn")
    samples = [f"s{i}" for i in range(40)]
    workers = [context.Process(target=_write, args=(tmp_path, samples)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    (path,) = tmp_path.rglob(RECORDS)
    assert list(read_records(path)) == samples
    assert len({record["by"] for record in read_records(path).values()}) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_gets_a_sentence(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UserError, match="cannot write results"), CellStore(tmp_path / "r", "c", IDENTITY):
        pass
