"""Where the shards of a command run: processes of this machine, or jobs of a SLURM cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import submitit
import torch
from submitit.core.utils import FailedJobError

from eval.errors import UserError

Work = Callable[[], Any]

_ASK = 15.0  # seconds between two questions to the scheduler
_GRACE = 30.0  # seconds for which a job may be out of the queue before its result is visible on a shared disk
_UNLIMITED_MIN = 60 * 24 * 365  # submitit wants a limit


@dataclass(frozen=True)
class LauncherConfig:
    """How work is sent out: the fields of `conf/hydra/launcher/grid.yaml`.

    Parameters
    ----------
    executor
        `inline` (this process), `submitit_local` (processes of this machine) or `submitit_slurm` (jobs).
    shards
        Parts that the samples are cut into, a job each.
    folder
        Where the logs go, in a folder a command.
    cpus_per_task
        Cores, and threads of torch, of a job; None for what the machine or the cluster gives.
    gpus_per_node
        GPUs of a job; None for one where there is one (`submitit_local`) or none (`submitit_slurm`).
    timeout_min
        Minutes until a SLURM job is stopped, requeued and resumed.
    max_requeues
        How often that happens to a job at most; preemptions do not count.
    mem_gb, partition, account, qos, gres
        Of a SLURM job; None for the cluster's default.
    array_parallelism
        Most SLURM jobs that run at once.
    additional_parameters
        Any other options of sbatch.
    """

    executor: str = "inline"
    shards: int = 1
    folder: str = "results/submitit"
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    timeout_min: int = 240
    max_requeues: int = 20
    mem_gb: float | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gres: str | None = None
    array_parallelism: int = 256
    additional_parameters: dict | None = None

    def __post_init__(self) -> None:
        if self.executor not in ("inline", *EXECUTORS):
            raise ValueError(f"executor must be inline, {' or '.join(EXECUTORS)}, not {self.executor!r}")
        for name in ("shards", "timeout_min", "array_parallelism", "cpus_per_task", "mem_gb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        for name in ("gpus_per_node", "max_requeues"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be 0 or more, not {value}")
        if self.executor == "inline" and self.shards > 1:
            raise ValueError(f"shards={self.shards} needs executor={' or '.join(EXECUTORS)}: inline is one process")


class Executor(Protocol):
    """Starts jobs, and knows which of them are over."""

    def check(self) -> None:
        """Refuse a machine that lacks what is needed, with a `UserError`, before anything is written."""

    def device(self, asked: str) -> str:
        """`model.device` of the jobs where `asked` is that of the command; `auto` must mean the same everywhere."""

    def submit(self, folder: Path, shards: Sequence[Work]) -> list[submitit.Job]:
        """Start a job a shard, with their logs in `folder`."""

    def over(self, job: submitit.Job) -> bool:
        """Whether a job has a result, or will have none."""

    def cancel(self, jobs: Sequence[submitit.Job]) -> None:
        """End jobs; what they stored stays."""


class Processes:
    """Jobs as processes of this machine, all at once, each with GPUs of its own as long as there are enough."""

    def __init__(self, config: LauncherConfig) -> None:
        self.config = config

    def check(self) -> None:
        """See `Executor`."""
        wanted, found = self.config.gpus_per_node or 0, len(_visible_gpus())
        if wanted > found:
            raise UserError(f"hydra.launcher.gpus_per_node={wanted}, but torch sees {found} GPUs")

    def device(self, asked: str) -> str:
        """See `Executor`."""
        return "cpu" if self.config.gpus_per_node == 0 and asked == "auto" else asked

    def submit(self, folder: Path, shards: Sequence[Work]) -> list[submitit.Job]:
        """See `Executor`."""
        gpus = _visible_gpus()
        each = min(1, len(gpus)) if self.config.gpus_per_node is None else self.config.gpus_per_node
        jobs = []
        for number, shard in enumerate(shards):
            dealt = [gpus[(number * each + i) % len(gpus)] for i in range(each)]
            executor = submitit.LocalExecutor(folder)
            executor.update_parameters(timeout_min=_UNLIMITED_MIN, gpus_per_node=each, visible_gpus=dealt)
            with _outside_of_a_job(), _deaf_to_ctrl_c():
                jobs.append(executor.submit(shard))
        return jobs

    def over(self, job: submitit.Job) -> bool:
        """See `Executor`."""
        return job.done()

    def cancel(self, jobs: Sequence[submitit.Job]) -> None:
        """See `Executor`. submitit's own way leaves a trace of every job on the screen."""
        for job in jobs:
            with suppress(psutil.NoSuchProcess):
                watcher = psutil.Process(int(job.job_id))
                watcher.suspend()  # it starts nothing any more
                for process in (*watcher.children(), watcher):
                    process.kill()


class Slurm:
    """Jobs of a SLURM cluster, as one array.

    Whether a job is alive is asked of squeue: every cluster has it, while sacct, which submitit asks, needs accounting.
    """

    def __init__(self, config: LauncherConfig) -> None:
        self.config = config
        self._asked, self._queue = float("-inf"), set[str]()
        self._absent: dict[str, float] = {}  # job → when it was first seen to be out of the queue

    def check(self) -> None:
        """See `Executor`."""
        lacking = [name for name in ("sbatch", "srun", "squeue", "scancel") if shutil.which(name) is None]
        if lacking:
            raise UserError(
                f"hydra.launcher.executor=submitit_slurm needs {', '.join(lacking)}, which this machine does not have: "
                "start it where jobs are sent from, or use submitit_local"
            )

    def device(self, asked: str) -> str:
        """See `Executor`: the machine that jobs are sent from may lack the GPU that they ask for."""
        if asked != "auto":
            return asked
        config, more = self.config, self.config.additional_parameters or {}
        asks = config.gpus_per_node or "gpu" in str(config.gres) or any("gpu" in f"{k}={v}" for k, v in more.items())
        return "cuda" if asks else "cpu"

    def submit(self, folder: Path, shards: Sequence[Work]) -> list[submitit.Job]:
        """See `Executor`.

        Raises
        ------
        UserError
            If sbatch refuses the jobs.
        """
        config = self.config
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=config.max_requeues)
        executor.update_parameters(
            name="graphkv",
            timeout_min=config.timeout_min,
            cpus_per_task=config.cpus_per_task,
            gpus_per_node=config.gpus_per_node,
            mem_gb=config.mem_gb,
            slurm_partition=config.partition,
            slurm_account=config.account,
            slurm_qos=config.qos,
            slurm_gres=config.gres,
            slurm_array_parallelism=config.array_parallelism,
            slurm_additional_parameters=config.additional_parameters,
            # Since SLURM 22.05 srun no longer takes this from the job.
            slurm_srun_args=config.cpus_per_task and [f"--cpus-per-task={config.cpus_per_task}"],
        )
        try:
            with _outside_of_a_job():
                return executor.submit_array(shards)
        except FailedJobError as error:
            raise UserError("sbatch refused the jobs; its reason stands above") from error

    def over(self, job: submitit.Job) -> bool:
        """See `Executor`."""
        if job.paths.result_pickle.exists():
            return True
        self._ask()
        if job.job_id in self._queue:
            self._absent.pop(job.job_id, None)
            return False
        return time.monotonic() - self._absent.setdefault(job.job_id, time.monotonic()) > _GRACE

    def cancel(self, jobs: Sequence[submitit.Job]) -> None:
        """See `Executor`."""
        subprocess.run(["scancel", *(job.job_id for job in jobs)])

    def _ask(self) -> None:
        """Look at the queue, unless it was looked at a moment ago; nothing is over while it does not answer."""
        if time.monotonic() - self._asked < _ASK:
            return
        self._asked = time.monotonic()
        command = ["squeue", "--noheader", "--array", "--format=%i", f"--user={os.getuid()}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"squeue does not answer, waiting: {done.stderr.strip()}", file=sys.stderr)
            self._absent.clear()
        else:
            self._queue = set(done.stdout.split())


EXECUTORS: dict[str, Callable[[LauncherConfig], Executor]] = {"submitit_local": Processes, "submitit_slurm": Slurm}


@contextmanager
def _outside_of_a_job() -> Iterator[None]:
    """No traces of the job that this command may itself run in; where SLURM's configuration is still holds."""
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with submitit.helpers.clean_env():
        os.environ.update(kept)
        yield


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """What is started here does not get the interrupt that a terminal sends to all processes of a command."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _visible_gpus() -> list[int]:
    """Numbers of the GPUs that this process may use, as CUDA counts them on this machine."""
    count, allowed = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count or allowed is None:
        return list(range(count))
    try:
        return [int(number) for number in allowed.split(",")][:count]
    except ValueError as error:
        raise UserError(f"CUDA_VISIBLE_DEVICES={allowed} must list GPUs by number for submitit_local") from error
