"""Looking after results: what is there, what is wrong with it, all of it as a table, and what may go."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from eval import results
from eval.cells import read_folder
from eval.records import MANIFEST, RECORDS, CellStore
from eval.tidy import tidy
from graphkv import grid
from graphkv.config import CONF, cell_settings, parse

ROOT = Path(__file__).resolve().parents[2]
GRAPH = {"source_ratio": 0.3, "neighbors": "auto3", "rounds": 1, "clamp": True}
RUN = {"run": "0ca1", "git_commit": "61eb", "git_dirty": False}
ODD = 'two\nlines\rand\r\nmore; "quotes", a comma,\ttab, naïve 日本 🦜 \u2028 \x00 NA'


def identity(scorer: str = "snapkv", budget: float = 96, graph: dict | None = None, protocol: str | None = None):
    """What a cell's records depend on, as `graphkv.work` writes it."""
    return {
        "model": {"name": "tiny", "weights": "05", "dtype": "float32", "attention": "sdpa", "device": "cpu"},
        "decode": {"mode": "batch", "evict_every": None},
        "task": {"name": "needle", "data": "f5"} | ({} if protocol is None else {"protocol": {"name": protocol}}),
        "cell": {
            "scorer": {"name": scorer, "window": 32, "pooling": "avg"},
            "budget": budget,
            "graphkv": graph,
            "granularity": "kv_head",
            "head_budget": "uniform",
            "head_floor": None,
        },
    }


def finished(sample: str, **more: Any) -> dict[str, Any]:
    """A finished record, as `graphkv.grid` writes it."""
    return {
        "sample": sample,
        "task": "needle",
        "status": "ok",
        "text": "In the park.",
        "scores": {"overlap": 0.5, "contains": 1},
        "ids": [5, 7, 9],
        "finish": "stop",
        "n_prompt": 400,
        "kept": [96.0, 95.0],
        "bytes": 49152,
        "seconds": {"prefill": 0.25, "select": 0.125, "decode": 0.5},
        "decode_batch": 2,
        "shared_with": None,
        "run": "0ca1",
        **more,
    }


def failed(sample: str) -> dict[str, Any]:
    """The record of a failure."""
    return {"sample": sample, "task": "needle", "status": "failed", "error": "MemoryError: no room", "run": "0ca1"}


def fill(root: Path, *records: dict, label: str = "snapkv-96", shard: tuple[int, int] | None = None, **cell) -> Path:
    """Write a cell through its store; returns its folder."""
    with CellStore(root / "tiny" / "needle", label, identity(**cell), shard) as store:
        store.note_run(RUN)
        for record in records:
            store.append(record)
    return store.folder


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    code = results.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def snapshot(root: Path) -> dict[Path, bytes]:
    """Contents of all files."""
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# status ---------------------------------------------------------------------------------------------------------


def test_status_is_a_line_a_cell_and_a_sum(capsys, tmp_path):
    fill(tmp_path, finished("a"), finished("b"), failed("c"))
    fill(tmp_path, failed("a"), finished("a"), label="h2o-0.1n", scorer="h2o", budget=0.1, protocol="official")
    code, out, err = run(capsys, "status", tmp_path)
    head, _, h2o, snapkv, _, total = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert head[:8] == ["cell", "key", "model", "task", "protocol", "finished", "failed", "state"]
    assert [h2o[0], *h2o[2:9]] == ["h2o-0.1n", "tiny", "needle", "official", "1", "0", "ok", "1"]
    assert [snapkv[0], *snapkv[2:9]] == ["snapkv-96", "tiny", "needle", "—", "2", "1", "ok", "1"]
    size = sum(map(len, snapshot(tmp_path).values()))
    assert " ".join(total).endswith(
        f"2 cells in {tmp_path}: 3 samples finished, 1 failed; 0 torn; {size / 1024:.1f} KiB"
    )


def test_status_tells_torn_damaged_and_unknown_cells(capsys, tmp_path):
    torn = fill(tmp_path, finished("a"), finished("b"))
    (torn / RECORDS).write_bytes((torn / RECORDS).read_bytes()[:-9])
    newer = fill(tmp_path, finished("a"), label="newer", budget=128)
    edit_manifest(newer, lambda m: m["identity"].update(schema=7))
    damaged = fill(tmp_path, finished("a"), label="damaged", budget=256)
    (damaged / MANIFEST).write_text("{")
    out = run(capsys, "status", tmp_path)[1]
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert lines["snapkv-96"][5:9] == ["1", "0", "torn", "1"]
    assert lines["newer"][2:10] == ["—", "—", "—", "0", "0", "1", "problem", "7"]
    assert lines["damaged"][2:10] == ["—", "—", "—", "1", "0", "1", "problem", "—"]
    assert out.endswith(f"2 cells with problems: python -m eval.results verify {tmp_path}\n")


@pytest.mark.parametrize("command", ["status", "verify"])
def test_no_results_and_no_folder(capsys, tmp_path, command):
    code, out, _ = run(capsys, command, tmp_path)
    assert code == 0 and out.startswith("0 cells")
    assert run(capsys, command, tmp_path / "none") == (2, "", f"error: {tmp_path / 'none'} is not a folder\n")


# verify ---------------------------------------------------------------------------------------------------------


def edit_manifest(folder: Path, change: Callable[[dict], Any]) -> None:
    """Change a manifest in place."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_results_in_order(capsys, tmp_path):
    fill(tmp_path, finished("a"), failed("b"), finished("b", text=ODD))
    fill(tmp_path, finished("a"), shard=(0, 2), budget=128)
    fill(tmp_path, finished("b", shared_with="snapkv-96"), failed("c"), shard=(1, 2), budget=128)
    before = snapshot(tmp_path)
    assert run(capsys, "verify", tmp_path) == (0, "2 cells, 5 samples, 0 warnings, 0 problems\n", "")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task": "hotpotqa"}, "task is 'hotpotqa', but its cell's is 'needle'"),
        ({"run": "ffff"}, "run 'ffff' is not in the manifest's runs"),
        ({"run": None}, "run is missing"),
        ({"status": "done"}, "status must be ok or failed, not 'done'"),
        ({"status": "failed"}, "error is missing"),
        ({"text": 3}, "text must be a text, which may be empty, not 3"),
        ({"text": "\ud800"}, "holds what no run writes ('utf-8' codec can't encode character"),
        ({"scores": {"overlap": math.nan}}, "scores must be an object of finite numbers, not {'overlap': nan}"),
        ({"scores": {"overlap": True}}, "scores must be an object of finite numbers"),
        ({"scores": {"overlap": 10**400}}, "scores must be an object of finite numbers"),
        ({"scores": {}}, "scores must be an object of finite numbers, not {}"),
        ({"meta": {"depth": math.inf}}, "holds what no run writes (Out of range float values"),
        ({"ids": "5 7"}, "ids must be a list of token ids, not '5 7'"),
        ({"ids": [5, -1]}, "ids must be a list of token ids"),
        ({"finish": "early"}, "finish must be stop, length or given, not 'early'"),
        ({"n_prompt": 400.0}, "n_prompt must be a whole number, 1 or more, not 400.0"),
        ({"kept": []}, "kept must be a list of numbers, one a layer, not []"),
        ({"kept": [96]}, "kept has 1 layers, but that of an earlier record 2"),
        ({"kept": [96, 401]}, "kept has 401 tokens, but the prompt 400"),
        ({"bytes": -1}, "bytes must be a whole number, 0 or more, not -1"),
        ({"bytes": 2**63}, "bytes must be a whole number, 0 or more"),
        ({"seconds": {"prefill": 0.1, "select": 0.1}}, "seconds.decode is missing"),
        ({"seconds": 3}, "seconds.prefill is missing"),
        ({"decode_batch": 0}, "decode_batch must be a whole number, 1 or more, not 0"),
        ({"shared_with": 2}, "shared_with must be a text, or null, not 2"),
        ({"sample": "a"}, "sample a was finished before, at"),
        ({"bytes": None, "run": "ffff"}, "run 'ffff' is not in the manifest's runs"),
    ],
)
def test_a_record_that_no_run_writes(capsys, tmp_path, change, says):
    folder = fill(tmp_path, finished("a"))
    with (folder / RECORDS).open("a") as stream:
        stream.write(json.dumps({**finished("b"), **change}) + "\n")
    before = snapshot(tmp_path)
    code, out, err = run(capsys, "verify", tmp_path)
    assert (code, err) == (1, "")
    assert f"{folder / RECORDS}:2: " in out and says in out
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"\x80\x00\xff", "'utf-8' codec can't decode"),
        (b"", "Expecting value"),
        (b"[1]", "not a JSON object"),
        (b'{"sample": ["a"], "status": "ok"}', "sample is missing, or is not a text"),
        (b'{"sample": "a"}', "status is missing"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"sample": "' + b"x" * 5_000_000 + b'", "status"}', "Expecting ':' delimiter"),
    ],
)
def test_a_line_that_is_no_record(capsys, tmp_path, line, says):
    """Said with its number, the lines after it are checked as well, and a run on that folder says the same."""
    folder = fill(tmp_path)
    (folder / RECORDS).write_bytes(line + b"\n" + json.dumps({**finished("a"), "bytes": None}).encode() + b"\n")
    code, out, err = run(capsys, "verify", tmp_path)
    first, second, total = out.splitlines()
    assert (code, err) == (1, "")
    assert first.startswith(f"{folder / RECORDS}:1 is not a record (") and says in first and len(first) < 500
    assert second == f"{folder / RECORDS}:2: bytes is missing"
    assert total == "1 cell, 1 sample, 0 warnings, 2 problems"
    with pytest.raises(results.UserError, match="records.jsonl:1 is not a record"):
        fill(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["identity"]["cell"].update(budget=97), "key is not the hash of the identity"),
        (lambda m: m["identity"]["cell"].update(budget=97), "the name of its folder does not end with -"),
        (lambda m: m["identity"].update(schema=2), "has schema 2, but this version writes 1"),
        (lambda m: m["identity"].update(cell=None), "identity.cell.scorer.name is missing"),
        (lambda m: m["identity"]["decode"].update(evict_every="x"), "identity.decode.evict_every must be a whole"),
        (lambda m: m["identity"]["cell"].update(budget=math.nan), "is damaged (Out of range float values"),
        (lambda m: m.update(runs=[3]), "runs[0].run is missing"),
        (lambda m: m.update(runs={}), "is damaged (runs must be a list)"),
        (lambda m: m["identity"].pop("schema"), "is damaged ('schema' is missing)"),
        (lambda m: m.update(identity=3), "is damaged ('int' object is not subscriptable)"),
    ],
)
def test_a_manifest_that_no_run_writes(capsys, tmp_path, change, says):
    folder = fill(tmp_path, finished("a"))
    edit_manifest(folder, change)
    code, out, err = run(capsys, "verify", tmp_path)
    assert (code, err) == (1, "")
    assert f"{folder / MANIFEST}" in out and says in out


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 50, b"[" * 100_000, b'{"identity": '])
def test_a_manifest_that_cannot_be_read(capsys, tmp_path, content):
    folder = fill(tmp_path, finished("a"), {**finished("b"), "ids": None})
    (folder / MANIFEST).write_bytes(content)
    code, out, err = run(capsys, "verify", tmp_path)
    manifest, record, total = out.splitlines()
    assert (code, err) == (1, "")
    assert manifest.startswith(f"{folder / MANIFEST} is damaged (")
    assert record == f"{folder / RECORDS}:2: ids is missing"
    assert total == "1 cell, 2 samples, 0 warnings, 2 problems"
    with pytest.raises(results.UserError, match="is damaged"):
        fill(tmp_path)


def test_the_records_of_another_schema_are_not_judged(capsys, tmp_path):
    folder = fill(tmp_path, finished("a"))
    edit_manifest(folder, lambda m: m["identity"].update(schema=2))
    (folder / RECORDS).write_text("{}\n{}\n")
    assert run(capsys, "verify", tmp_path)[1].endswith("1 cell, 0 samples, 0 warnings, 1 problem\n")


def test_a_folder_without_a_manifest(capsys, tmp_path):
    folder = fill(tmp_path, finished("a"))
    (folder / MANIFEST).unlink()
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1 and f"{folder} has records but no manifest.json" in out
    (folder / RECORDS).write_bytes(b"")
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 0 and out.startswith(f"warning: {folder} is empty: a run was stopped before its first sample\n")


def test_a_sample_in_two_files(capsys, tmp_path):
    """A failure may be repeated elsewhere, a success may not."""
    folder = fill(tmp_path, finished("a"), failed("b"))
    fill(tmp_path, finished("b"), shard=(0, 2))
    assert run(capsys, "verify", tmp_path)[1] == "1 cell, 2 samples, 0 warnings, 0 problems\n"
    (folder / "records-1of2.jsonl").write_text(json.dumps(finished("a")) + "\n")
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert f"{folder / RECORDS}:1: sample a was finished before, at {folder}/records-1of2.jsonl:1\n" in out


def test_a_torn_last_line_is_a_warning_and_stays(capsys, tmp_path):
    folder = fill(tmp_path, finished("a"), finished("b"))
    whole = (folder / RECORDS).read_bytes()
    (folder / RECORDS).write_bytes(whole[:-5])
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 0
    assert out.splitlines()[0].startswith(f"warning: {folder / RECORDS}:2 is torn: ")
    assert out.splitlines()[1] == "1 cell, 1 sample, 1 warning, 0 problems"
    assert (folder / RECORDS).read_bytes() == whole[:-5]


def test_a_file_that_cannot_be_opened_does_not_hide_the_others(capsys, tmp_path):
    folder = fill(tmp_path, {**finished("a"), "bytes": None})
    (folder / "records-0of2.jsonl").mkdir()
    out = run(capsys, "verify", tmp_path)[1]
    assert f"{folder}/records-0of2.jsonl cannot be read: Is a directory\n" in out
    assert "bytes is missing" in out


# export ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> pd.DataFrame:
    """What was exported; in CSV, texts as they are and the rest as numbers."""
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, keep_default_na=False)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".CSV"])
def test_export_is_a_row_a_cell_and_sample(capsys, tmp_path, suffix):
    fill(tmp_path, finished("a", text=ODD), failed("b"), graph=GRAPH, label="snapkv-96+graphkv")
    fill(tmp_path, finished("a", text="", shared_with="snapkv-96+graphkv"), budget=0.1, protocol="paper")
    file = tmp_path / f"all{suffix}"
    assert run(capsys, "export", file, tmp_path) == (0, f"{file}: 3 rows, 1 of them failed\n", "")
    table = read(file)
    graph, failure, plain = (row for _, row in table.iterrows())
    expected = {
        **{"model": "tiny", "dtype": "float32", "device": "cpu", "attention": "sdpa", "task": "needle", "data": "f5"},
        **{"scorer": "snapkv", "scorer_options": '{"pooling": "avg", "window": 32}', "granularity": "kv_head"},
        **{"head_budget": "uniform", "graphkv": True, "graph_source_ratio": 0.3, "graph_neighbors": "auto3"},
        **{"graph_rounds": 1, "graph_clamp": True, "decode": "batch", "cell": "snapkv-96+graphkv", "sample": "a"},
        **{"status": "ok", "score_overlap": 0.5, "score_contains": 1.0, "kept": 95.5, "bytes": 49152},
        **{"n_prompt": 400, "tokens": 3, "finish": "stop", "seconds_prefill": 0.25, "seconds_select": 0.125},
        **{"seconds_decode": 0.5, "decode_batch": 2, "run": "0ca1", "git_commit": "61eb", "git_dirty": False},
        **{"bias": "none", "fold": False, "selector": "topk", "text": ODD},
    }
    for name, value in expected.items():
        assert str(graph[name]).lower() == str(value).lower() or float(graph[name]) == value, name
    empty = {"protocol", "budget_ratio", "head_floor", "evict_every", "shared_with", "error", "selector_options"}
    assert set(table) == {*expected, *empty, "budget", "key"} and list(table)[-2:] == ["text", "error"]
    for name in empty:
        assert pd.isna(graph[name]) or graph[name] == "", name
    assert float(graph["budget"]) == 96 and float(plain["budget_ratio"]) == 0.1
    assert [plain["protocol"], plain["text"], plain["shared_with"]] == ["paper", "", "snapkv-96+graphkv"]
    assert [failure["status"], failure["error"]] == ["failed", "MemoryError: no room"]
    assert failure["key"] == graph["key"] != plain["key"]
    assert not list(tmp_path.glob("*.part"))


def test_what_corrects_and_what_selects_have_columns(tmp_path):
    folder = fill(tmp_path, finished("a"))
    (cell,) = [read_folder(folder)]
    settings = cell_settings("snapkv", 96, bias="mass", fold=True, selector={"name": "mmr", "weight": 0.5})
    cell.identity["cell"] = settings.describe()
    (row,) = tidy([cell]).to_dict("records")
    assert [row["bias"], row["fold"], row["selector"]] == ["mass", True, "mmr"]
    assert json.loads(row["selector_options"])["weight"] == 0.5


def test_parquet_keeps_types(capsys, tmp_path):
    fill(tmp_path, finished("a"), failed("b"), graph=GRAPH)
    fill(tmp_path, finished("a"), graph={**GRAPH, "neighbors": 5})
    run(capsys, "export", tmp_path / "all.parquet", tmp_path)
    table = pd.read_parquet(tmp_path / "all.parquet")
    types = {"budget": "Int64", "graph_rounds": "Int64", "graphkv": "boolean", "git_dirty": "boolean"}
    types |= {"score_overlap": "Float64", "graph_source_ratio": "Float64", "tokens": "Int64", "graph_clamp": "boolean"}
    assert {name: str(table[name].dtype) for name in types} == types
    assert sorted(table["graph_neighbors"]) == ["5", "auto3", "auto3"]
    assert table["tokens"].isna().sum() == 1


def test_csv_tells_an_empty_text_from_none(capsys, tmp_path):
    fill(tmp_path, finished("a", text=""), failed("b"))
    run(capsys, "export", tmp_path / "all.csv", tmp_path)
    _, first, second = (tmp_path / "all.csv").read_text().splitlines()
    assert first.endswith(',"0ca1","61eb",false,"",') and second.endswith(',,"MemoryError: no room"')


def test_export_refuses(capsys, tmp_path):
    """Another suffix, no records, results with problems, a folder that is not there; nothing is written then."""
    file = tmp_path / "all.csv"
    code, _, err = run(capsys, "export", tmp_path / "all.xlsx", tmp_path)
    assert (code, err) == (
        2,
        f"error: cannot export to {tmp_path / 'all.xlsx'}: its name must end with .csv or .parquet\n",
    )
    assert run(capsys, "export", file, tmp_path) == (2, "", f"error: there are no records in {tmp_path}\n")
    sound = fill(tmp_path, finished("a"))
    fill(tmp_path, {**finished("a"), "bytes": None}, budget=128)
    code, _, err = run(capsys, "export", file, tmp_path)
    assert code == 2 and err.startswith(f"error: {tmp_path} has 1 problem, so nothing is exported; ")
    assert not file.exists()
    assert run(capsys, "export", file, sound)[0] == 0
    code, _, err = run(capsys, "export", tmp_path / "none" / "all.csv", sound)
    assert (code, err) == (2, f"error: cannot write {tmp_path}/none/all.csv: No such file or directory\n")


def test_export_replaces_a_file_only_when_it_is_whole(capsys, tmp_path, monkeypatch):
    fill(tmp_path, finished("a"))
    file = tmp_path / "all.csv"
    file.write_text("the old one")

    def full_disk(table, stream):
        stream.write(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eval.tidy.write_csv", full_disk)
    assert run(capsys, "export", file, tmp_path)[::2] == (
        2,
        f"error: cannot write {file}: No space left on device\n",
    )
    assert file.read_text() == "the old one"
    assert not list(tmp_path.glob("*.part"))


# gc -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path) -> dict[str, Path]:
    """A folder of each kind."""
    folders = {
        "done": fill(tmp_path, finished("a")),
        "h2o": fill(tmp_path, finished("a"), label="h2o-128", scorer="h2o", budget=128),
        "failed": fill(tmp_path, failed("a"), label="h2o-96", scorer="h2o"),
        "newer": fill(tmp_path, finished("a"), budget=64),
        "damaged": fill(tmp_path, budget=32),
    }
    edit_manifest(folders["newer"], lambda m: m["identity"].update(schema=2))
    (folders["damaged"] / RECORDS).write_bytes(b"\xff\n")
    return folders


def left(shelf: dict[str, Path]) -> set[str]:
    """Which folders are there."""
    return {name for name, folder in shelf.items() if folder.exists()}


def answer(monkeypatch, text: str) -> None:
    """A terminal where somebody types `text`."""
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda question: print(question, end="") or text)


def test_gc_without_conditions_explains_and_removes_nothing(capsys, tmp_path, shelf):
    before = snapshot(tmp_path)
    code, out, _ = run(capsys, "gc", tmp_path, "--yes")
    lines = {line.split()[0]: line.split()[1:3] for line in out.splitlines()[1:]}
    assert code == 0 and lines["--unfinished"] == ["1", "folder,"] and lines["--unknown-schema"] == ["1", "folder,"]
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("conditions", "removed"),
    [
        (["--unfinished"], {"failed"}),
        (["--unknown-schema"], {"newer"}),
        (["--where", "scorer=h2o"], {"h2o", "failed"}),
        (["--where", "scorer=h2o", "--where", "budget=128"], {"h2o"}),
        (["--where", "scorer=h2o", "--unfinished"], {"failed"}),
        (["--where", "model=tiny"], {"done", "h2o", "failed", "damaged"}),
        (["--where", "graphkv=on"], set()),
        (["--where", "protocol=None"], set()),
        (["--where", "cell=h2o-96"], {"failed"}),
        (["--unfinished", "--unknown-schema"], set()),
    ],
)
def test_gc_removes_what_meets_all_conditions(capsys, tmp_path, shelf, conditions, removed):
    code, out, err = run(capsys, "gc", tmp_path, *conditions, "--yes")
    assert (code, err) == (0, "")
    assert left(shelf) == set(shelf) - removed
    assert out.endswith(f"{len(removed)} removed, 0 left\n" if removed else "nothing to remove\n")


@pytest.mark.parametrize(("typed", "goes"), [("y", True), ("YES ", True), ("n", False), ("", False), ("yy", False)])
def test_gc_asks(capsys, tmp_path, shelf, monkeypatch, typed, goes):
    answer(monkeypatch, typed)
    code, out, _ = run(capsys, "gc", tmp_path, "--unfinished")
    assert code == 0 and "h2o-96" in out and "remove 1 folder, " in out and "? [y/N] " in out
    assert left(shelf) == set(shelf) - ({"failed"} if goes else set())
    assert goes or out.endswith("nothing is removed\n")


def test_gc_without_a_terminal_removes_nothing(tmp_path, shelf):
    command = [sys.executable, "-m", "eval.results", "gc", str(tmp_path), "--where", "scorer=h2o"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 2 folders, ") and "nothing is removed" in done.stderr
    assert "Traceback" not in done.stderr and left(shelf) == set(shelf)


def test_gc_leaves_what_a_process_writes(capsys, tmp_path, shelf):
    holder = (
        "import json, sys; from pathlib import Path; from eval.records import CellStore\n"
        "with CellStore(Path(sys.argv[1]), 'h2o-128', json.loads(sys.argv[2]), (0, 2)):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", holder, shelf["h2o"].parent, json.dumps(identity(scorer="h2o", budget=128))]
    process = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        code, out, err = run(capsys, "gc", tmp_path, "--where", "scorer=h2o", "--yes")
        assert (code, err) == (1, f"left: {shelf['h2o']} is written by a running process\n")
        assert out.endswith("1 removed, 1 left\n") and left(shelf) == set(shelf) - {"failed"}
    finally:
        process.communicate("")
    assert run(capsys, "gc", tmp_path, "--where", "scorer=h2o", "--yes")[0] == 0
    assert left(shelf) == set(shelf) - {"failed", "h2o"}


def test_gc_looks_again_after_the_question(capsys, tmp_path, shelf, monkeypatch):
    """The cell was finished while somebody thought about the answer."""
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda _: fill(tmp_path, finished("a"), label="h2o-96", scorer="h2o") and "y")
    code, _, err = run(capsys, "gc", tmp_path, "--unfinished")
    assert (code, err) == (1, f"left: {shelf['failed']} has changed meanwhile\n")
    assert left(shelf) == set(shelf)


def test_gc_keeps_files_that_are_not_of_a_cell(capsys, tmp_path, shelf):
    (shelf["failed"] / "notes.txt").write_text("mine")
    code, _, err = run(capsys, "gc", tmp_path, "--unfinished", "--yes")
    assert code == 1 and "Directory not empty" in err
    assert [path.name for path in shelf["failed"].iterdir()] == ["notes.txt"]


def test_gc_removes_old_parts_of_files(capsys, tmp_path, shelf):
    old, new, other = (tmp_path / name for name in ("t.csv.12.part", "manifest.json.13.part", "film.part"))
    for path in (old, new, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (1e9, 1e9))
    assert "--parts              1 file " in run(capsys, "gc", tmp_path)[1]
    code, out, _ = run(capsys, "gc", tmp_path, "--parts", "--yes")
    assert (code, out) == (0, f"{old}\n1 removed, 0 left\n")
    assert new.exists() and other.exists() and left(shelf) == set(shelf)


@pytest.mark.parametrize("text", ["scorer", "colour=red", "=", "Scorer=h2o"])
def test_gc_names_the_fields_it_knows(capsys, tmp_path, shelf, text):
    code, _, err = run(capsys, "gc", tmp_path, "--where", text, "--yes")
    assert code == 2 and err.startswith(f"error: --where {text}: must be FIELD=VALUE, and FIELD one of model, ")
    assert left(shelf) == set(shelf)


# Real records ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["needle", "longbench"])
def test_what_a_run_writes(capsys, tmp_path, task):
    options = {
        "needle": ["task.lengths=[300]", "task.depths=[0,100]", "task.max_new_tokens=4"],
        "longbench": ["task=longbench", "task.data=mini", "task.tasks=[trec,samsum]", "limit=1"],
    }[task]
    cells = [["scorer=full"], ["scorer=snapkv", "+graphkv=on"], ["scorer=h2o", "head_budget=ada"]]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        common = ["model=tiny", "budget=64", f"results_dir={tmp_path}", *options]
        configs = [parse(compose("config", overrides=[*common, *cell])) for cell in cells]
    assert grid.run(configs) == 0
    capsys.readouterr()

    n_cells = 3 if task == "needle" else 6
    assert run(capsys, "verify", tmp_path) == (0, f"{n_cells} cells, 6 samples, 0 warnings, 0 problems\n", "")
    assert (
        f"{n_cells} cells in {tmp_path}: 6 samples finished, 0 failed; 0 torn; " in run(capsys, "status", tmp_path)[1]
    )
    for file in (tmp_path / "all.csv", tmp_path / "all.parquet"):
        assert run(capsys, "export", file, tmp_path) == (0, f"{file}: 6 rows, 0 of them failed\n", "")
    table = pd.read_parquet(tmp_path / "all.parquet")
    assert sorted(set(table["scorer"])) == ["full", "h2o", "snapkv"]
    assert (table["kept"] <= table["n_prompt"]).all()
    assert (table["graphkv"] == table["graph_edge"].notna()).all()
    assert table.loc[table["scorer"] == "snapkv", "graph_edge"].eq("kk").all()
    assert table["protocol"].dropna().eq("official").sum() == (0 if task == "needle" else 6)
    assert table["git_commit"].notna().all() or not (ROOT / ".git").exists()
    records = [
        json.loads(line) for path in tmp_path.rglob(RECORDS) for line in path.read_text("utf-8").split("\n")[:-1]
    ]
    assert sorted(table["text"]) == sorted(record["text"] for record in records)
    pd.testing.assert_series_equal(read(tmp_path / "all.csv")["text"], table["text"], check_dtype=False)
