"""A command cut into jobs: the same records and table as one process, whatever becomes of the jobs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf, open_dict

import run as entry
from eval import records
from eval.errors import UserError
from eval.records import CellStore, read_cell
from graphkv import executors, grid, shards
from graphkv.config import CONF, build, parse
from graphkv.executors import LauncherConfig, Processes, Slurm
from graphkv.shards import ShardJob

TINY = ["model=tiny", "task.lengths=[400,700]", "task.depths=[0,50,100]", "task.max_new_tokens=4", "budget=64"]
GUIDE = (CONF.parent / "docs" / "cluster.md").read_text(encoding="utf-8")
LOCAL = "hydra.launcher.executor=submitit_local"
VOLATILE = ("seconds", "run")


@pytest.fixture
def run(monkeypatch, capfd) -> Callable[..., SimpleNamespace]:
    """`python run.py` with arguments, inside this process; its jobs are processes of their own."""

    def call(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        capfd.readouterr()
        code = 0
        try:
            entry.main()
        except SystemExit as exit_:
            code = exit_.code
        finally:
            GlobalHydra.instance().clear()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


def stored(folder: Path) -> dict[tuple[str, str], dict]:
    """(cell's folder, sample) → its record, but for what may differ between two runs; repeated ones are refused."""
    return {
        (cell.name, sample): {key: value for key, value in record.items() if key not in VOLATILE}
        for cell in {path.parent for path in folder.rglob("records*.jsonl")}
        for sample, record in read_cell(cell).items()
    }


def table(out: str) -> list[list[str]]:
    """Columns of a printed table without the last one, its seconds; no paths of figures."""
    return [line.split()[:-1] for line in out.splitlines() if not line.startswith("/")]


def plain(*overrides: str) -> dict:
    """The configuration of a command line as a job gets it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)


def test_shards_give_the_records_and_the_table_of_one_process(run, tmp_path):
    sweep = ["-m", *TINY, "scorer=snapkv,pyramidkv", "+graphkv=on,off"]
    inline = run(*sweep, f"results_dir={tmp_path}/inline")
    assert inline.code == 0, inline.err
    command = [*sweep, LOCAL, "shards=2", f"results_dir={tmp_path}/cut"]
    cut = run(*command)
    assert cut.code == 0, cut.err
    assert "6 samples × 4 cells, 6 samples to do" in cut.err and "sent 2 of 2 shards as jobs" in cut.err
    expected = stored(tmp_path / "inline")
    assert len(expected) == 24 and stored(tmp_path / "cut") == expected
    assert table(cut.out) == table(inline.out) and len(table(cut.out)) == 6
    files = sorted((tmp_path / "cut").rglob("records*.jsonl"))
    assert {path.name for path in files} == {"records-0of2.jsonl", "records-1of2.jsonl"} and len(files) == 8

    again = run(*command)
    assert again.code == 0 and "0 samples to do" in again.err and "sent" not in again.err
    assert again.out == cut.out

    # One shard lost the ends of its files, as by a power failure: it alone is sent again, and does that sample alone.
    for path in files:
        if path.name == "records-1of2.jsonl":
            path.write_bytes(path.read_bytes()[:-20])
    resumed = run(*command)
    assert resumed.code == 0, resumed.err
    assert "1 samples to do" in resumed.err and "sent 1 of 2 shards as jobs" in resumed.err
    assert stored(tmp_path / "cut") == expected


def test_a_shard_that_dies_is_reported_and_the_same_command_does_the_rest(run, tmp_path, monkeypatch):
    death = "import os, sys\nprint('no room left in here', file=sys.stderr, flush=True)\nos._exit(9)"

    def second_dies(configs: list, shard: tuple[int, int], threads: int | None) -> Callable:
        return partial(exec, death, {}) if shard[0] == 1 else ShardJob(configs, shard, threads)

    # A single run, and more shards than samples: the third has nothing to do and is not sent.
    command = [*TINY, "limit=2", LOCAL, "shards=3", f"results_dir={tmp_path}"]
    monkeypatch.setattr(shards, "ShardJob", second_dies)
    done = run(*command)
    assert done.code == 1
    assert "sent 2 of 3 shards as jobs" in done.err and "(shard 0 of 3): done" in done.err
    assert "(shard 1 of 3) ended without a result; the end of" in done.err and "| no room left in here" in done.err
    assert "1 results failed or are missing; the same command tries them again" in done.err
    row = next(line for line in done.out.splitlines() if line.startswith("snapkv-64"))
    assert "1/2" in row and row.split()[1] == "—"

    monkeypatch.undo()
    again = run(*command)
    assert again.code == 0 and "sent 1 of 3 shards as jobs" in again.err
    assert len(stored(tmp_path)) == 2


def test_what_a_job_says_of_itself(tmp_path, capsys):
    def ended(*works: Callable) -> list[str]:
        executor = Processes(LauncherConfig("submitit_local"))
        jobs = executor.submit(tmp_path, works)
        while not all([executor.over(job) for job in jobs]):
            time.sleep(0.1)
        results = [shards.tell(job, (number, len(jobs))) for number, job in enumerate(jobs)]
        return [str(results), *capsys.readouterr().err.splitlines()]

    results, done, some, wrong, *bug = ended(
        partial(abs, 0), partial(abs, -2), partial("the disk is {}".format, "full"), partial(int, "seven")
    )
    assert results == "[True, True, False, False]"
    assert done.endswith("(shard 0 of 4): done")
    assert "(shard 1 of 4): 2 results failed or are missing; the end of" in some
    assert wrong.endswith("(shard 2 of 4) stopped: the disk is full")
    assert "(shard 3 of 4) ended without a result" in bug[0] and "ValueError: invalid literal" in bug[-1]


@pytest.mark.parametrize(
    ("each", "dealt"), [(None, ["5", "3", "4", "5"]), (2, ["5,3", "4,5", "3,4", "5,3"]), (0, ["", "", "", ""])]
)
def test_processes_get_the_gpus_that_may_be_used_in_turn(tmp_path, monkeypatch, each, dealt):
    monkeypatch.setattr(executors.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,4")
    executor = Processes(LauncherConfig("submitit_local", gpus_per_node=each))
    executor.check()
    jobs = executor.submit(tmp_path, [partial(os.getenv, "CUDA_VISIBLE_DEVICES")] * 4)
    while not all([executor.over(job) for job in jobs]):
        time.sleep(0.1)
    assert [job.result() for job in jobs] == dealt


def test_gpus_that_are_not_named_by_number_cannot_be_dealt(monkeypatch):
    monkeypatch.setattr(executors.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    with pytest.raises(UserError, match="must list GPUs by number"):
        Processes(LauncherConfig("submitit_local")).check()


def test_a_job_that_is_told_to_stop_is_started_again_and_resumes(tmp_path):
    depths = ",".join(map(str, range(100)))
    overrides = ["model=tiny", "task.lengths=[700]", f"task.depths=[{depths}]", "decode=solo", "budget=64"]
    job = ShardJob([plain(*overrides, f"results_dir={tmp_path}")], (0, 1), 1)
    executor = Processes(LauncherConfig("submitit_local"))
    (sent,) = executor.submit(tmp_path / "logs", [job])
    while not any(path.read_text().count("\n") > 2 for path in tmp_path.rglob("records-0of1.jsonl")):
        assert not executor.over(sent), sent.stderr()
        time.sleep(0.02)
    (worker,) = psutil.Process(int(sent.job_id)).children()
    worker.send_signal(signal.SIGUSR2)  # what a cluster sends before a time limit
    while not executor.over(sent):
        time.sleep(0.1)
    assert sent.result() == 0
    to_do = [int(line.split(", ")[1].split()[0]) for line in sent.stderr().splitlines() if "samples to do" in line]
    assert to_do[0] == 100 and len(to_do) == 2 and 0 < to_do[1] < 98
    assert len(stored(tmp_path)) == 100


def test_ctrl_c_ends_the_jobs_and_says_what_remains(run, tmp_path, monkeypatch):
    sent: list = []

    def interrupted(self: Processes, job) -> bool:
        if not sent:
            sent.append(psutil.Process(int(job.job_id)))
            raise KeyboardInterrupt
        return job.done()

    monkeypatch.setattr(Processes, "over", interrupted)
    done = run(*TINY, LOCAL, "shards=2", f"results_dir={tmp_path}")
    assert done.code == 130
    assert f"cancelled jobs {sent[0].pid}, " in done.err and "6 results remain" in done.err
    assert not sent[0].is_running()


def test_a_job_that_cannot_write_says_so_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    said = ShardJob([plain(*TINY, f"results_dir={tmp_path}/file")], (0, 2), None)()
    assert said.startswith("cannot write results to")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shards=0"], "hydra.launcher: shards must be positive, not 0"),
        (["shards=two"], "hydra.launcher.shards must be a whole number, not 'two'"),
        (["-m", "shards=1,2"], "shards is one number for the whole command"),
        (["shards=2"], "shards=2 needs executor=submitit_local or submitit_slurm"),
        (["hydra.launcher.shards=2"], "shards=2 needs executor=submitit_local or submitit_slurm"),
        (["hydra.launcher.executor=pbs"], "executor must be inline, submitit_local or submitit_slurm, not 'pbs'"),
        (["hydra.launcher.mem_gb=lots"], "hydra.launcher.mem_gb must be a number or null"),
        (["hydra.launcher.gpus_per_node=-1"], "gpus_per_node must be 0 or more, not -1"),
        ([LOCAL, "hydra.launcher.gpus_per_node=99"], "gpus_per_node=99, but torch sees"),
        (
            ["hydra.launcher.executor=submitit_slurm"],
            "needs sbatch, srun, squeue, scancel, which this machine does not",
        ),
        ([LOCAL, "budget=5"], "budget=5 is below the window"),
    ],
)
def test_mistakes_write_nothing(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(executors.shutil, "which", lambda name: None)
    multirun, arguments = arguments[:1] == ["-m"], [word for word in arguments if word != "-m"]
    tiny = [word for word in TINY if not word.startswith("budget=")]
    done = run(*["-m"] * multirun, *tiny, *arguments, f"results_dir={tmp_path}/results")
    assert done.code == 2
    assert done.err.startswith("error: ") and message in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_shards_of_two_lists_of_samples_wait_for_each_other(tmp_path, monkeypatch):
    class Waits(Exception):
        pass

    def impatient(seconds: float) -> None:
        raise Waits

    monkeypatch.setattr(records.time, "sleep", impatient)
    with CellStore(tmp_path, "c", {}, (0, 2), "long"):
        with CellStore(tmp_path, "c", {}, (1, 2), "long") as other:
            assert other.path.name == "records-1of2.jsonl"
        for shard, cut in [((1, 2), "short"), ((0, 2), "short"), ((0, 2), "long"), ((1, 3), "long"), (None, "")]:
            with pytest.raises(Waits), CellStore(tmp_path, "c", {}, shard, cut):
                pass


def test_every_sample_is_in_one_shard(tmp_path):
    config = parse(OmegaConf.create(plain(*TINY, f"results_dir={tmp_path}")))
    groups = [grid.prepare([config], (number, 4))[0] for number in range(4)]
    parts = [[sample.id for sample in group.samples] for group in groups]
    assert sorted(map(len, parts)) == [1, 1, 2, 2]
    assert sorted(sum(parts, [])) == sorted(sample.id for sample in groups[0].task.samples)


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Callable[[str, str], None]:
    """A machine whose SLURM commands are shell scripts: each logs its arguments and runs a given line."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)

    def command(name: str, line: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.log\n{line}\n')
        path.chmod(0o755)

    for name in ("sbatch", "srun", "squeue", "scancel"):
        command(name, "exit 0")
    return command


def test_slurm_gets_what_was_asked_for(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/somewhere/slurm.conf")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")  # this command may run in a job, whose limits are not the new ones'
    slurm("sbatch", f'env > {tmp_path}/env.log; cp "$1" {tmp_path}/script; echo Submitted batch job 12')
    asked = {
        "partition": "gpu",
        "gres": "gpu:a100:1",
        "mem_gb": 24,
        "cpus_per_task": 4,
        "timeout_min": 90,
        "qos": "low",
    }
    more = {"account": "lab", "array_parallelism": 2, "additional_parameters": {"constraint": "ib"}}
    executor = Slurm(build(LauncherConfig, {"executor": "submitit_slurm", **asked, **more}, "hydra.launcher"))
    executor.check()
    jobs = executor.submit(tmp_path / "logs", [ShardJob([], (number, 3), 4) for number in range(3)])
    assert [job.job_id for job in jobs] == ["12_0", "12_1", "12_2"]
    lines = (tmp_path / "script").read_text().splitlines()
    options = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH --"))
    expected = {"array": "0-2%2", "time": "90", "mem": "24GB", "cpus-per-task": "4", "constraint": "ib"}
    expected |= {"partition": "gpu", "gres": "gpu:a100:1", "account": "lab", "qos": "low"}
    assert options.items() >= expected.items()
    srun = next(shlex.split(line) for line in lines if line.startswith("srun"))
    assert "--cpus-per-task=4" in srun
    environment = dict(line.split("=", 1) for line in (tmp_path / "env.log").read_text().splitlines() if "=" in line)
    assert environment["SLURM_CONF"] == "/somewhere/slurm.conf" and "SLURM_MEM_PER_NODE" not in environment
    executor.cancel(jobs)
    assert (tmp_path / "scancel.log").read_text() == "12_0 12_1 12_2\n"


def test_a_job_is_over_with_its_result_or_when_it_stays_out_of_the_queue(slurm, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(executors.time, "monotonic", lambda: now[0])

    def at(seconds: float) -> bool:
        now[0] = seconds
        return executor.over(job)

    slurm("sbatch", "echo Submitted batch job 12")
    executor = Slurm(LauncherConfig("submitit_slurm"))
    (job,) = executor.submit(tmp_path / "logs", [ShardJob([], (0, 1), None)])
    slurm("squeue", "echo 11; echo 12")
    assert not at(1) and not at(1000)
    slurm("squeue", "echo 11")  # requeued jobs may be away for a moment
    assert not at(2000) and not at(2015)
    slurm("squeue", "echo 12")
    assert not at(2050)
    slurm("squeue", "echo cannot connect >&2; exit 1")
    assert not any(at(2100 + 10 * step) for step in range(20))
    slurm("squeue", "")
    assert not at(3000) and not at(3029) and at(3031)
    executor = Slurm(LauncherConfig("submitit_slurm"))
    assert not at(4000)
    job.paths.result_pickle.touch()
    assert at(4001)


def test_jobs_that_sbatch_refuses_are_a_sentence(slurm, tmp_path):
    slurm("sbatch", "echo sbatch: error: invalid partition specified: moon >&2; exit 1")
    with pytest.raises(UserError, match="sbatch refused the jobs"):
        Slurm(LauncherConfig("submitit_slurm", partition="moon")).submit(tmp_path, [ShardJob([], (0, 1), None)])


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({}, "cpu"),
        ({"gpus_per_node": 1}, "cuda"),
        ({"gpus_per_node": 0}, "cpu"),
        ({"gres": "gpu:1"}, "cuda"),
        ({"gres": "shard:1"}, "cpu"),
        ({"additional_parameters": {"gpus-per-task": 1}}, "cuda"),
    ],
)
def test_auto_is_the_device_that_the_jobs_ask_for_and_not_that_of_the_machine(options, device):
    executor = Slurm(LauncherConfig("submitit_slurm", **options))
    assert executor.device("auto") == device
    assert executor.device("cuda:1") == "cuda:1"


@pytest.mark.parametrize("command", [line for line in GUIDE.splitlines() if line.startswith("python run.py")])
def test_every_command_of_the_guide_composes(command):
    words = [word for word in shlex.split(command)[2:] if word != "-m"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=words, return_hydra_config=True)
    launcher = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    with open_dict(config):
        del config["hydra"]
    settings = shards.settings_of([config], launcher)
    assert parse(config).name in ("demo", "table1") and settings.shards == config.shards


def test_the_numbers_of_the_guide_are_what_its_lines_compute(capsys):
    (lines,) = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.S)
    exec(compile(lines, "cluster.md", "exec"), {})
    *rows, totals = capsys.readouterr().out.splitlines()
    assert len(rows) == 3 and all(f"\n{row}\n" in GUIDE for row in rows)
    _, limit, _, slow, one_by_one, one_by_one_on_8 = re.findall(r"([\d.]+) h", totals)
    prose = " ".join(GUIDE.split())
    assert f"{limit} hours on 8 GPUs if every step" in prose and f"{slow} hours at 30 ms a step" in prose
    assert f"{float(one_by_one):.0f} hours on one GPU and {one_by_one_on_8} hours on 8" in prose
