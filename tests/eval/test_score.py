"""The scoring command: published folders, the layouts it reads, what it writes, and its messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval import metrics, predictions, score

ROOT = Path(__file__).resolve().parents[2]
PREDICTIONS = Path(os.environ.get("GRAPHKV_SHARED", ROOT.parent / "shared")) / "data/longbench_preds"
published = pytest.mark.skipif(not PREDICTIONS.is_dir(), reason=f"no published predictions in {PREDICTIONS}")

QASPER = {"pred": "The cat", "answers": ["cat", "dog"], "all_classes": None, "length": 3999}
TREC = {"pred": "\nDate\nFood", "answers": ["Date"], "all_classes": ["Food", "Date"], "length": 4000}
LCC = {"pred": "tide", "answers": ["diet"], "all_classes": None, "length": 8000}


def write(path: Path, *rows: dict | str) -> Path:
    """A JSON-lines file; texts are lines as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    code = score.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def table(out: str) -> dict[str, list[str]]:
    """First cell → other cells of the printed lines; cells are two blanks apart."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]
    return {line[0]: line[1:] for line in lines if line}


@published
@pytest.mark.parametrize(
    ("folder", "options", "means"),
    [
        ("viridisGreen__llama2-7b-chat-4k", [], ["33.06", "32.74"]),
        ("JFan1997__phi-2", ["--similarity", "levenshtein"], ["25.08", "25.78"]),
        ("JFan1997__gemma-2b_partial", ["--similarity", "levenshtein"], ["—", "—"]),
        ("delsiiin__vicuna-v1.3-7b", [], ["—", "—"]),
        ("kotmul__llama3-8b-inst_E", ["--e"], None),
    ],
)
def test_published_folders(capsys, tmp_path, folder, options, means):
    out, rows = tmp_path / "scores.json", tmp_path / "rows.jsonl"
    code, printed, errors = run(capsys, PREDICTIONS / folder, *options, "--out", out, "--rows", rows)
    assert (code, errors) == (0, "")
    expected = json.loads((PREDICTIONS / folder / "published_result.json").read_text("utf-8"))
    written = json.loads(out.read_text("utf-8"))
    assert written["scores"] == expected
    assert written["similarity"] == ("levenshtein" if options[:1] == ["--similarity"] else "difflib")
    assert written["metric_versions"] == metrics.METRIC_VERSIONS

    shown = table(printed)
    for task, value in expected.items():
        values = value.values() if isinstance(value, dict) else [value]
        assert shown[task][1:] == [f"{v:.2f}" for v in values]
    if means is not None:
        assert [*shown["mean of 16 tasks"], *shown["mean of 6 categories"]] == means
    assert f"edit similarity: {written['similarity']}" in printed
    assert "metric versions: qa_f1 1, rouge_l 1" in printed

    lines = [json.loads(line) for line in rows.read_text("utf-8").splitlines()]
    assert f"{len(lines)} rows in " in printed
    official = json.loads((PREDICTIONS / folder / "row_scores_official_difflib.json").read_text("utf-8"))
    for line in lines:
        key = "edit_difflib" if "edit_difflib" in line else "score"
        assert line[key] == pytest.approx(official[line["task"]][line["index"]], abs=1e-9)


def test_means_are_refused_where_a_row_is_missing(capsys, tmp_path):
    """All 16 tasks are there, but not all of their rows."""
    rows = {
        "qa_f1": QASPER,
        "rouge_l": QASPER,
        "classification": TREC,
        "count": QASPER,
        "edit_similarity": LCC,
    }
    rows["retrieval"] = {**QASPER, "answers": ["Paragraph 3"]}
    for task in metrics.LONGBENCH:
        write(
            tmp_path / f"{task}.jsonl",
            *[rows[metrics.TASKS[task].metric]] * (200 if task != "qmsum" else 199),
        )
    _, out, _ = run(capsys, tmp_path)
    assert table(out)["mean of 16 tasks"] == ["—"]
    assert "and so no means: multifieldqa_en 200 (150), qmsum 199 (200), lcc 200 (500)" in out.replace("\n", " ")
    for task, n in {"multifieldqa_en": 150, "qmsum": 200, "lcc": 500, "repobench-p": 500}.items():
        write(tmp_path / f"{task}.jsonl", *[rows[metrics.TASKS[task].metric]] * n)
    _, out, _ = run(capsys, tmp_path)
    assert float(table(out)["mean of 16 tasks"][0]) > 0
    assert "and so no means" not in out


def test_back_ends(capsys, tmp_path):
    write(tmp_path / "lcc.jsonl", LCC)
    out = tmp_path / "scores.json"
    for options, value in (
        ([], 25.0),
        (["--similarity", "difflib"], 25.0),
        (["--similarity", "levenshtein"], 50.0),
    ):
        run(capsys, tmp_path, *options, "--out", out)
        assert json.loads(out.read_text("utf-8"))["scores"] == {"lcc": value}


def test_buckets_and_e_names(capsys, tmp_path):
    write(tmp_path / "qasper_e.jsonl", QASPER, {**QASPER, "length": 4000, "pred": "no"})
    out = tmp_path / "scores.json"
    code, printed, _ = run(capsys, tmp_path, "--e", "--out", out)
    assert code == 0
    assert json.loads(out.read_text("utf-8"))["scores"] == {"qasper_e": {"0-4k": 100.0, "4-8k": 0.0, "8k+": None}}
    assert table(printed)["qasper_e"] == ["2", "100.00", "0.00", "—"]
    assert "not LongBench's number of rows: qasper_e 2 (224)" in printed
    run(capsys, tmp_path, "--out", out)
    assert json.loads(out.read_text("utf-8"))["scores"] == {"qasper_e": 50.0}


def test_kvcache_factory_tree(capsys, tmp_path):
    """A row of the table per method, a dash where it has no predictions (H12), metrics.json is not one."""
    row = {**QASPER, "_id": "x", "prompt": "…", "dataset": "qasper"}
    for model in ("llama3_64", "llama3_512"):
        write(tmp_path / model / "qasper" / "SnapKV.json", row, {**row, "_id": "y", "pred": "fish"})
        write(tmp_path / model / "trec" / "pyramidkv.json", TREC)
        write(tmp_path / model / "trec" / "metrics.json", "{}")
        write(tmp_path / model / "notes" / "SnapKV.json", "{}")
    out, rows = tmp_path / "scores.json", tmp_path / "rows.jsonl"
    code, printed, _ = run(capsys, tmp_path / "llama3_512", "--out", out, "--rows", rows)
    assert code == 0
    shown = table(printed)
    order = ["run", *metrics.LONGBENCH]
    assert shown["SnapKV"][order.index("qasper") - 1] == "50.00"
    assert shown["SnapKV"][order.index("trec") - 1] == "—"
    assert shown["pyramidkv"][order.index("trec") - 1] == "100.00"
    assert shown["SnapKV"][-2:] == ["—", "—"]
    assert json.loads(out.read_text("utf-8"))["scores"] == {
        "SnapKV": {"qasper": 50.0},
        "pyramidkv": {"trec": 100.0},
    }
    lines = [json.loads(line) for line in rows.read_text("utf-8").splitlines()]
    assert [(line["run"], line["task"], line["index"], line["score"]) for line in lines] == [
        ("SnapKV", "qasper", 0, 1.0),
        ("SnapKV", "qasper", 1, 0.0),
        ("pyramidkv", "trec", 0, 1.0),
    ]
    run(capsys, tmp_path, "--out", out)
    assert list(json.loads(out.read_text("utf-8"))["scores"]) == [
        "llama3_512/SnapKV",
        "llama3_512/pyramidkv",
        "llama3_64/SnapKV",
        "llama3_64/pyramidkv",
    ]


def test_other_files_are_named(capsys, tmp_path):
    write(tmp_path / "qasper.jsonl", QASPER, "", "   ")
    write(tmp_path / "dureader.jsonl", "not read")
    write(tmp_path / "result.json", "{}")
    code, printed, _ = run(capsys, tmp_path)
    assert code == 0
    assert "not scored: dureader.jsonl" in printed
    assert table(printed)["qasper"] == ["1", "100.00"]
    assert table(printed)["narrativeqa"] == ["—", "—"]


def test_odd_texts_are_scored(capsys, tmp_path):
    rows = [{**QASPER, "pred": text} for text in ("", "\ud800", "\u2028 None", "\r\n", "x\x00")]
    write(tmp_path / "qasper.jsonl", *rows)
    out = tmp_path / "rows.jsonl"
    code, _, _ = run(capsys, tmp_path, "--rows", out)
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert code == 0
    assert [line["metric_status"] for line in lines] == ["empty", "ok", "ok", "empty", "ok"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([QASPER, '{"pred": "x", '], "qasper.jsonl:2 is not a JSON object: "),
        ([QASPER, "", "3"], "qasper.jsonl:3: not a JSON object"),
        (["[" * 100_000], "qasper.jsonl:1 is not a JSON object: "),
        ([{**QASPER, "pred": None}], "qasper.jsonl:1: pred must be a text"),
        ([{"answers": ["x"]}], "qasper.jsonl:1: pred must be a text"),
        ([{**QASPER, "answers": []}], "qasper.jsonl:1: answers must be a list of at least one text"),
        ([{**QASPER, "answers": "cat"}], "qasper.jsonl:1: answers must be a list of at least one text"),
        ([{**QASPER, "all_classes": "a"}], "qasper.jsonl:1: all_classes must be a list of texts, or null"),
        ([{**QASPER, "length": "12"}], "qasper.jsonl:1: length must be a whole number"),
        ([{**QASPER, "_id": "x"}] * 2, "qasper.jsonl:2: sample x is a duplicate of line 1"),
        ([], "qasper.jsonl has no rows"),
    ],
)
def test_broken_rows(capsys, tmp_path, lines, says):
    write(tmp_path / "qasper.jsonl", *lines)
    code, out, errors = run(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert says in errors


def test_rows_that_a_metric_refuses(capsys, tmp_path):
    """M7 and the like: said with file and line."""
    write(tmp_path / "trec.jsonl", TREC, {**TREC, "all_classes": ["Date", "Food"]})
    assert "trec.jsonl:2: all_classes differs from that of the first row" in run(capsys, tmp_path)[2]
    write(tmp_path / "trec.jsonl", {**TREC, "all_classes": None})
    assert "trec.jsonl:1: all_classes is missing" in run(capsys, tmp_path)[2]
    (tmp_path / "trec.jsonl").unlink()
    write(tmp_path / "passage_retrieval_en.jsonl", QASPER)
    assert "passage_retrieval_en.jsonl:1: the reference 'cat' names no paragraph" in run(capsys, tmp_path)[2]
    (tmp_path / "passage_retrieval_en.jsonl").unlink()
    write(tmp_path / "qasper.jsonl", {**QASPER, "length": None})
    assert "qasper.jsonl:1: length is missing" in run(capsys, tmp_path, "--e")[2]
    assert run(capsys, tmp_path)[0] == 0
    (tmp_path / "qasper.jsonl").write_bytes(b'{"pred": "\xff"}')
    assert "qasper.jsonl:1 is not a JSON object: 'utf-8' codec" in run(capsys, tmp_path)[2]


def test_bad_folders(capsys, tmp_path):
    assert run(capsys, tmp_path / "none") == (2, "", f"error: {tmp_path / 'none'} is not a folder\n")
    code, _, errors = run(capsys, tmp_path)
    assert code == 2
    assert errors.startswith(f"error: {tmp_path} holds no predictions: allowed are <task>.jsonl, ")
    write(tmp_path / "qasper.jsonl", QASPER)
    code, _, errors = run(capsys, tmp_path, "--out", tmp_path / "none" / "scores.json")
    assert (code, errors) == (
        2,
        f"error: cannot write {tmp_path}/none/scores.json: No such file or directory\n",
    )


def test_command_line(tmp_path):
    """As a user calls it: exit codes, and no stack trace."""
    write(tmp_path / "qasper.jsonl", QASPER, "{")
    command = [sys.executable, "-m", "eval.score", str(tmp_path)]
    broken = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (broken.returncode, broken.stdout) == (2, "")
    assert "qasper.jsonl:2" in broken.stderr and "Traceback" not in broken.stderr
    unknown = subprocess.run([*command, "--similarity", "x"], cwd=ROOT, capture_output=True, text=True)
    assert unknown.returncode == 2 and "Traceback" not in unknown.stderr


def test_runs_are_read_one_at_a_time(tmp_path):
    write(tmp_path / "a_64" / "qasper" / "a.json", QASPER)
    write(tmp_path / "b_64" / "qasper" / "a.json", "broken")
    first = next(predictions.read_runs(tmp_path))
    assert (first.name, list(first.tasks)) == ("a_64/a", ["qasper"])
