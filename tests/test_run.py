"""The commands of the README on the tiny model: sweep, resume, failure, and one sentence for every mistake."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException

import run as entry
from eval.records import RECORDS, read_records
from graphkv import grid
from graphkv.config import CONF, parse
from graphkv.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
README = re.findall(r"^python run.py.*", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M)
TINY = ["model=tiny", "task.lengths=[400,700]", "task.depths=[0,50,100]", "task.max_new_tokens=6"]


@pytest.fixture
def run(monkeypatch, capfd):
    """`python run.py` with arguments, inside this process: an interpreter that loads torch takes seconds."""

    def call(*arguments: str, results: Path) -> subprocess.CompletedProcess:
        argv = ["run.py", *arguments, f"results_dir={results}"]
        monkeypatch.setattr(sys, "argv", argv)
        capfd.readouterr()
        code = 0
        try:
            entry.refuse_slips(argv[1:])
            entry.main()
        except SystemExit as exit_:
            code = exit_.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        finally:
            GlobalHydra.instance().clear()
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(argv, code or 0, out, err)

    return call


def composed(*overrides: str):
    """The configuration that a command line composes to."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def records_in(folder: Path) -> dict[str, dict]:
    """All records below a folder, by cell folder."""
    return {path.parent.name: read_records(path) for path in sorted(folder.rglob(RECORDS))}


def test_sweep_then_the_same_again(run, tmp_path):
    sweep = ["-m", *TINY, "scorer=snapkv,pyramidkv", "+graphkv=on,off", "budget=64,128"]
    first = run(*sweep, results=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "6 samples × 8 cells, 6 samples to do" in first.stderr
    table = first.stdout.splitlines()
    assert len([line for line in table if "6/6" in line]) == 8
    for label in ("snapkv-64+graphkv", "pyramidkv-128"):
        assert any(line.split()[0] == label for line in table[2:10])
    figures = sorted(path.suffix for path in (tmp_path / "figures").iterdir())
    assert figures == [".pdf", ".png"]

    before = records_in(tmp_path)
    assert len(before) == 8 and all(len(records) == 6 for records in before.values())
    again = run(*sweep, results=tmp_path)
    assert again.returncode == 0
    assert "6 samples × 8 cells, 0 samples to do" in again.stderr
    assert again.stdout == first.stdout
    assert records_in(tmp_path) == before

    # A larger sweep does only what is new.
    more = run(*sweep[:-1], "budget=64,96", results=tmp_path)
    assert "6 samples to do" in more.stderr and len(records_in(tmp_path)) == 12
    for name, records in before.items():
        assert records_in(tmp_path)[name] == records


@pytest.mark.parametrize("command", README)
def test_a_command_of_the_readme_runs(command, run, tiny, tmp_path):
    words = shlex.split(command, comments=True)[2:]
    if "model=local" in words:
        tiny.model.save_pretrained(tmp_path / "saved")
        tiny.tokenizer.save_pretrained(tmp_path / "saved")
        words = [word.replace("/path/to/folder", str(tmp_path / "saved")) for word in words]
    else:
        words = [word for word in words if not word.startswith("model=")] + ["model=tiny"]
    words = [word for word in words if not word.startswith("task.lengths=")]
    done = run(*words, "task.lengths=[400]", "task.max_new_tokens=3", "limit=2", results=tmp_path / "results")
    assert done.returncode == 0, done.stderr
    cells = records_in(tmp_path / "results")
    assert cells and all([r["status"] for r in found.values()] == ["ok", "ok"] for found in cells.values())
    if "-m" in words:
        assert done.stdout.count(" 2/2 ") == len(cells) > 1  # a line a cell


def test_records_say_what_was_kept(run, tmp_path):
    done = run("-m", *TINY, "limit=4", "scorer=full,pyramidkv", "+graphkv=on", "budget=100", results=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = records_in(tmp_path)
    assert {name.rsplit("-", 1)[0] for name in cells} == {"full", "pyramidkv-100+graphkv"}
    for name, records in cells.items():
        assert [r["n_prompt"] for r in records.values()] == [400, 400, 400, 700]
        for r in records.values():
            expected = r["n_prompt"] * 2 if name.startswith("full") else 200
            assert sum(r["kept"]) == expected
            assert r["bytes"] == expected * 2 * 2 * 16 * 4  # KV heads, keys and values, head size, float32
            assert r["decode_batch"] == 2 and r["finish"] in ("stop", "length")
            assert set(r["scores"]) == {"overlap", "rouge1", "contains"}
    first = {tuple(records[s]["ids"][0] for s in records) for records in cells.values()}
    assert len(first) == 1  # token 0 is the full cache's
    manifest = json.loads(next(tmp_path.rglob("full-*/manifest.json")).read_text())
    assert manifest["identity"]["model"]["name"] == "tiny"
    assert manifest["runs"][0]["packages"]["torch"]


def test_batch_of_a_command_equals_cells_one_by_one(run, tmp_path):
    cells = ["scorer=snapkv,knorm", "+graphkv=on,off", "budget=64"]
    run("-m", *TINY, *cells, results=tmp_path / "together")
    for scorer in ("snapkv", "knorm"):
        for graph in ("on", "off"):
            one = run(*TINY, f"scorer={scorer}", f"+graphkv={graph}", "budget=64", results=tmp_path / "alone")
            assert one.returncode == 0, one.stderr
    together, alone = records_in(tmp_path / "together"), records_in(tmp_path / "alone")
    assert together.keys() == alone.keys()
    same = ("text", "ids", "scores", "kept", "bytes", "n_prompt", "finish")
    for name in together:
        for sample, record in together[name].items():
            assert {k: record[k] for k in same} == {k: alone[name][sample][k] for k in same}


def test_the_command_itself(tmp_path):
    command = [sys.executable, "run.py", *TINY, "limit=1", "+graphkv=on", "budget=64", f"results_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 samples × 1 cells, 1 samples to do" in done.stderr and "snapkv-64+graphkv" in done.stdout
    refused = subprocess.run([*command, "budget=5"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr == "error: budget is given twice, as 64 and as 5: keep one\n"


def test_a_failing_sample_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    config = composed(*TINY, "budget=64", f"results_dir={tmp_path}")
    decode = Engine.decode

    def fail_on_700(self, prefill, *arguments, **options):
        if prefill.n == 700:
            raise MemoryError("no room")
        return decode(self, prefill, *arguments, **options)

    monkeypatch.setattr(Engine, "decode", fail_on_700)
    with pytest.raises(SystemExit) as exit_code:
        grid.main([config])
    out = capsys.readouterr()
    assert exit_code.value.code == 1
    assert "failed: needle-dolores-700-0, snapkv-64: MemoryError: no room" in out.err
    assert "3/6 (3 failed)" in out.out
    row = next(line for line in out.out.splitlines() if line.startswith("snapkv-64"))
    assert row.split()[1] == "—"  # no mean over what is left
    monkeypatch.setattr(Engine, "decode", decode)
    grid.main([config])
    assert "3 samples to do" in capsys.readouterr().err
    (records,) = records_in(tmp_path).values()
    assert [record["status"] for record in records.values()] == ["ok"] * 6


def test_ctrl_c_keeps_what_was_finished(tmp_path, monkeypatch, capsys):
    config = composed(*TINY, "budget=64", f"results_dir={tmp_path}")
    decode, calls = Engine.decode, []

    def interrupt(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(self, *arguments, **options)

    monkeypatch.setattr(Engine, "decode", interrupt)
    with pytest.raises(SystemExit) as exit_code:
        grid.main([config])
    assert exit_code.value.code == 130
    assert "the same command does the rest" in capsys.readouterr().err
    (records,) = records_in(tmp_path).values()
    assert len(records) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scorer=pyramidkvv"], "pyramidkv"),  # H17: lists the options
        (["budget=-5"], "budget must be 1 or more tokens, not -5"),
        (["budget=31"], "below the window of 32 tokens"),
        (["budget=512", "budget=0.1"], "budget is given twice"),
        (["budget=many"], "budget must be whole tokens or a ratio"),
        (["budgett=128"], "budgett"),
        (["+budgett=128"], "budgett is not a setting"),
        (["scorer.kernal=5"], "kernal"),
        (["+scorer.kernal=5"], "did you mean kernel"),
        (["+graphkv=on", "graphkv.neighbors=min(3,L)"], "graphkv.neighbors=auto3"),
        (["graphkv=on"], r"+graphkv=on"),
        (["task.haystack=nowhere"], "nowhere"),
        (["model.path=nowhere"], "holds no config.json"),
        (["task.lengths=[5000]"], "4096"),
        (["task.lengths=[60]"], "60"),
        (["limit=0"], "limit must be a positive number"),
        (["decode.mode=fast"], "decode: mode must be batch or solo"),
        (["prefill.chunk=-1"], "prefill: chunk"),
    ],
)
def test_mistakes_write_nothing(run, tmp_path, arguments, message):
    done = run("model=tiny", *arguments, results=tmp_path / "results")
    assert done.returncode not in (0, 130)
    said = done.stderr + done.stdout
    assert message in said, said
    assert "Traceback" not in said
    assert not (tmp_path / "results").exists()


def test_an_empty_haystack_writes_nothing(run, tmp_path):
    (tmp_path / "empty").mkdir()
    done = run("model=tiny", f"task.haystack={tmp_path / 'empty'}", results=tmp_path / "results")
    assert done.returncode == 2 and "no .txt file" in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_bad_cell_in_a_sweep_stops_it_before_anything_is_written(run, tmp_path):
    done = run("-m", *TINY, "budget=64,16", results=tmp_path / "results")
    assert done.returncode == 2
    assert done.stderr.startswith("error: budget=16 is below the window") and done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_documented_graph_commands_compose():
    # Cases H14 and H15: with a plus, quoted or not, and rounds may be swept over off too.
    assert parse(composed("+graphkv=on")).cell.graph is not None
    assert parse(composed("+graphkv=off")).cell.graph is None
    assert parse(composed("+graphkv=off", "graphkv.rounds=2")).cell.graph is None
    assert parse(composed("+graphkv=on", "graphkv.rounds=2")).cell.graph.rounds == 2
    assert parse(composed()).cell.graph is None
    assert parse(composed("+graphkv=on", 'graphkv.neighbors="min(3,L)"')).cell.graph.n_neighbors(2500) == 2
    with pytest.raises(ConfigCompositionException, match=r"\+graphkv"):
        composed("graphkv=on")
    with pytest.raises(HydraException):
        composed("+graphkv=on", "graphkv.neighbors=min(3,L)")  # H16: Hydra's grammar; run.py says how it is meant


@pytest.mark.parametrize("group", sorted(path.name for path in CONF.iterdir() if path.is_dir()))
def test_every_file_in_conf_composes(group):
    plus = "+" if group == "graphkv" else ""
    for file in sorted((CONF / group).glob("*.yaml")):
        extra = ["model.path=somewhere"] if file.stem == "local" else []
        assert parse(composed(f"{plus}{group}={file.stem}", *extra)).cell.label


def test_settings_that_differ_have_different_labels_and_keys():
    # Case H9.
    labels = set()
    for override in ("budget=64", "budget=0.1", "scorer=knorm", "scorer.kernel=5", "scorer.pooling=max"):
        labels.add(parse(composed(override)).cell.label)
    for override in ("graphkv.rounds=2", "graphkv.neighbors=5", "graphkv.source_ratio=0.5", "graphkv.rounds=1"):
        labels.add(parse(composed("+graphkv=on", override)).cell.label)
    assert len(labels) == 9
    assert "snapkv(kernel=5)-256" in labels and "snapkv-256+graphkv(rounds=2)" in labels
