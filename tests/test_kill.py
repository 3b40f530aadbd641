"""Processes that are killed, interrupted, started twice, or out of disk: in the end as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Command, finish

from scripts.drill_kill import compare, drill, records

SAMPLES = 16
SWEEP = [
    *("-m", "model=tiny", "scorer=snapkv", "+graphkv=on,off", "budget=64", "task.max_new_tokens=6"),
    "task.lengths=[400,500]",
    f"task.depths=[{','.join(str(5 * i) for i in range(SAMPLES // 2))}]",
]
WHOLE = {"lost": 0, "repeated": 0, "differing": 0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """Results of the sweep in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, said = finish([*SWEEP, f"results_dir={folder / 'results'}"], folder / "log")
    assert code == 0, said
    assert len(records(folder / "results")) == 2 * SAMPLES
    return folder / "results"


@pytest.fixture
def remount(tmp_path):
    """Mounts a tmpfs at `tmp_path / "results"`; called with mount options, it changes them."""
    folder = tmp_path / "results"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(folder), "-o"]
    if os.geteuid() or subprocess.run([*mount, "size=16m"], capture_output=True).returncode:
        pytest.skip("only root can mount a disk of its own to fill up")
    yield lambda options: subprocess.run([*mount, f"remount,{options}"], check=True)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def samples_to_do(said: str) -> int:
    """What a command announces."""
    return int(re.search(r"(\d+) samples to do", said)[1])


def test_killed_at_random_moments(tmp_path):
    # Cases H1 and H3; `scripts/drill_kill.py` does the same with more kills and interpreters of their own.
    counts = drill(SWEEP, kills=5, folder=tmp_path, start=Command)
    assert counts["kills"] == 5 and counts["within"] >= 3 and counts["after"] == 1
    assert {name: counts[name] for name in WHOLE} == WHOLE
    assert len(records(tmp_path / "killed")) == 2 * SAMPLES


def test_the_drill_sees_what_is_lost_repeated_or_different(tmp_path):
    for folder, lines in {
        "a": ['{"sample": "1", "text": "x", "run": 1}', '{"sample": "2"}', '{"sample": "3"}'],
        "b": ['{"sample": "1", "text": "y", "run": 2}', '{"sample": "2", "run": 3}', '{"sample": "2"}'],
    }.items():
        (tmp_path / folder / "cell").mkdir(parents=True)
        (tmp_path / folder / "cell" / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert compare(tmp_path / "a", tmp_path / "b") == {"lost": 1, "repeated": 1, "differing": 1}
    assert compare(tmp_path / "a", tmp_path / "a") == WHOLE


def test_ctrl_c_in_the_middle_leaves_the_rest_to_the_rerun(tmp_path, undisturbed):
    arguments, log = [*SWEEP, f"results_dir={tmp_path / 'results'}"], tmp_path / "log"
    process = Command(arguments, log)
    while "\n[" not in log.read_text() and process.poll() is None:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    said = log.read_text()
    assert said.endswith("stopped: what was finished is stored; the same command does the rest\n")
    assert "Traceback" not in said
    code, said = finish(arguments, log)
    assert code == 0 and 0 < samples_to_do(said) < SAMPLES
    assert compare(undisturbed, tmp_path / "results") == WHOLE


def test_two_processes_at_once_share_the_work_of_one(tmp_path, undisturbed):
    logs = [tmp_path / name for name in "ab"]
    processes = [Command([*SWEEP, f"results_dir={tmp_path / 'results'}"], log) for log in logs]
    assert [process.wait() for process in processes] == [0, 0]
    said = [log.read_text() for log in logs]
    assert sorted(map(samples_to_do, said)) == [0, SAMPLES]
    assert compare(undisturbed, tmp_path / "results") == WHOLE


@pytest.mark.parametrize("size", ["4k", "24k", "48k"], ids=["manifest", "records", "figure"])
def test_a_full_disk_gets_a_sentence_and_what_is_stored_stays(tmp_path, undisturbed, remount, size):
    arguments = [*SWEEP, f"results_dir={tmp_path / 'results'}"]
    remount(f"size={size}")
    code, said = finish(arguments, tmp_path / "log")
    assert code == 2 and "Traceback" not in said
    assert re.fullmatch(r"error: cannot write \S.*: No space left on device", said.splitlines()[-1])
    stored, whole = records(tmp_path / "results"), records(undisturbed)
    assert stored.items() <= whole.items() and (len(stored) > 0) == (size != "4k")
    for path in (tmp_path / "results").rglob("records.jsonl"):
        assert path.read_bytes()[-1:] in (b"", b"\n")  # no torn line
    assert not list((tmp_path / "results").rglob("*.part"))

    remount("size=16m")
    finished = Counter(sample for _, sample in stored)
    code, said = finish(arguments, tmp_path / "log")
    assert code == 0 and samples_to_do(said) == SAMPLES - list(finished.values()).count(2)
    assert compare(undisturbed, tmp_path / "results") == WHOLE


def test_a_read_only_disk_gets_a_sentence(tmp_path, remount):
    remount("ro")
    code, said = finish([*SWEEP, f"results_dir={tmp_path / 'results'}"], tmp_path / "log")
    assert code == 2 and re.fullmatch(r"error: cannot write results to \S+: Read-only file system\n", said)
    assert not list((tmp_path / "results").iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_gets_a_sentence(tmp_path):
    (tmp_path / "results").mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    code, said = finish([*SWEEP, f"results_dir={tmp_path / 'results'}"], tmp_path / "log")
    assert code == 2 and re.fullmatch(r"error: cannot write results to \S+: Permission denied\n", said)


def newer_schema(manifest: str) -> str:
    """A manifest as a later version might write it."""
    parsed = json.loads(manifest)
    parsed["identity"]["schema"] = 99
    return json.dumps(parsed)


@pytest.mark.parametrize(
    ("change", "message"),
    [(newer_schema, r"has schema 99, but this version writes \d+"), (lambda text: text[:-40], "is damaged")],
    ids=["newer", "damaged"],
)
def test_a_manifest_that_cannot_be_trusted_stops_the_command(
    tmp_path, undisturbed, change: Callable[[str], str], message
):
    shutil.copytree(undisturbed, tmp_path / "results")
    manifest, *_ = sorted((tmp_path / "results").rglob("manifest.json"))
    manifest.write_text(change(manifest.read_text()))
    before = {path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()}
    code, said = finish([*SWEEP, f"results_dir={tmp_path / 'results'}"], tmp_path / "log")
    assert code == 2 and re.fullmatch(rf"error: {re.escape(str(manifest))} {message}.*\n", said)
    assert {path: path.read_bytes() for path in before} == before
