"""A command as one process, or cut by samples into jobs: what is to do, who does it, what came of it.

Every job is a whole run of its shard: it finds its own samples, skips what is stored, and appends to files of its own.
So a job that was killed, preempted or requeued resumes from its records, and tables need nothing but the records.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import submitit
import torch
from omegaconf import DictConfig, OmegaConf
from submitit.core.utils import UncompletedJobError

from eval.errors import UserError
from graphkv import grid
from graphkv.config import build, parse
from graphkv.executors import EXECUTORS, Executor, LauncherConfig
from graphkv.work import Group, Shard

_PAUSE = 0.5  # seconds between two looks at the jobs
_PATIENCE = 5.0  # seconds that cancelled jobs are given to end
_TAIL = 15  # lines that are shown of a log

Plain = dict[str, Any]
"""A resolved configuration as plain containers."""


@dataclass(frozen=True)
class ShardJob(submitit.helpers.Checkpointable):
    """What a job does, in plain values that a file can hold; requeued as it is, since its records are its state.

    Parameters
    ----------
    configs
        The configurations of the command.
    shard
        Which part of the samples.
    threads
        Of torch; None leaves torch's choice.
    """

    configs: list[Plain]
    shard: Shard
    threads: int | None

    def __call__(self) -> int | str:
        """How many results of the shard are failed or missing; or the sentence that says what is wrong."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            return grid.run([parse(OmegaConf.create(config)) for config in self.configs], self.shard)
        except UserError as error:
            return str(error)


def main(configs: Sequence[DictConfig], launcher: DictConfig) -> None:
    """Run the cells of one command as the launcher's settings say; exit codes are those of `grid.main`.

    Parameters
    ----------
    configs
        One a cell, without Hydra's own node.
    launcher
        The node `hydra.launcher`.
    """
    grid.end(lambda: run(configs, launcher))


def run(configs: Sequence[DictConfig], launcher: DictConfig) -> int:
    """See `main`; returns how many results are failed or missing."""
    settings = settings_of(configs, OmegaConf.to_container(launcher, resolve=True))
    parsed = [parse(config) for config in configs]
    if settings.executor == "inline":
        return grid.run(parsed)
    executor = EXECUTORS[settings.executor](settings)
    executor.check()
    plain = [as_sent(config, executor) for config in configs]
    groups = grid.prepare([parse(OmegaConf.create(config)) for config in plain])
    grid.look(groups)
    for group in groups:
        grid.announce(group)
    shards = with_work(groups, settings.shards)
    dead = send(executor, settings, plain, shards, groups) if shards else 0
    missing = grid.show(groups)
    if dead and not missing:  # it died after its work, and what is known of that was said
        raise SystemExit(1)
    return missing


def settings_of(configs: Sequence[DictConfig], launcher: Mapping[str, Any]) -> LauncherConfig:
    """The launcher's settings, which are those of the whole command."""
    if len({str(config.shards) for config in configs}) > 1:
        raise UserError("shards is one number for the whole command: it cannot be swept over")
    return build(LauncherConfig, {key: value for key, value in launcher.items() if key != "_target_"}, "hydra.launcher")


def as_sent(config: DictConfig, executor: Executor) -> Plain:
    """A configuration as a job gets it: plain, resolved, with the device that the job will have."""
    plain = OmegaConf.to_container(config, resolve=True)
    plain["model"]["device"] = executor.device(plain["model"]["device"])
    return plain


def with_work(groups: Sequence[Group], count: int) -> list[Shard]:
    """The shards that have something to do, by the records that were read."""
    shards = [(number, count) for number in range(count)]
    return [shard for shard in shards if any(replace(group, shard=shard).missing() for group in groups)]


def send(
    executor: Executor,
    settings: LauncherConfig,
    configs: list[Plain],
    shards: Sequence[Shard],
    groups: Sequence[Group],
) -> int:
    """Start a job a shard, wait for all of them, and tell how each ended; returns how many ended without a result.

    Raises
    ------
    KeyboardInterrupt
        After the jobs were cancelled.
    """
    folder = new_folder(Path(settings.folder))
    jobs = executor.submit(folder, [ShardJob(configs, shard, settings.cpus_per_task) for shard in shards])
    running = dict(zip(jobs, shards, strict=True))
    say(f"sent {len(jobs)} of {settings.shards} shards as jobs {names(jobs)}; their logs: {folder}")
    dead = 0
    try:
        while running:
            time.sleep(_PAUSE)
            for job in [job for job in running if executor.over(job)]:
                dead += not tell(job, running.pop(job))
    except KeyboardInterrupt:
        cancel(executor, list(running))
        say(f"{grid.look(groups)} results remain")
        raise
    return dead


def tell(job: submitit.Job, shard: Shard) -> bool:
    """Say how a job that is over went, with the end of its log where it did not go well; False without a result."""
    label, log = f"job {job.job_id} (shard {shard[0]} of {shard[1]})", job.paths.stderr
    try:
        result = job.result() if job.paths.result_pickle.exists() else None
    except UncompletedJobError:
        result = None
    if result == 0:
        say(f"{label}: done")
    elif result is None:
        say(f"{label} ended without a result; {tail(log)}")
    elif isinstance(result, str):
        say(f"{label} stopped: {result}")
    else:
        say(f"{label}: {result} results failed or are missing; {tail(log)}")
    return isinstance(result, int)


def tail(log: Path) -> str:
    """The end of a log, or that there is none."""
    if not log.is_file():
        return f"it wrote no {log}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
    return "\n    | ".join([f"the end of {log}:", *lines])


def cancel(executor: Executor, jobs: Sequence[submitit.Job]) -> None:
    """Cancel jobs and wait a moment for their end, so that what they had finished can be counted."""
    executor.cancel(jobs)
    say(f"cancelled jobs {names(jobs)}")
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and not all([executor.over(job) for job in jobs]):
        time.sleep(_PAUSE)


def new_folder(root: Path) -> Path:
    """A folder for the logs of one command: those of another may have jobs of the same ids."""
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write the logs of jobs to {folder}: {error.strerror}") from error
    return folder


def names(jobs: Sequence[submitit.Job]) -> str:
    """The ids of jobs."""
    return ", ".join(job.job_id for job in jobs)


def say(text: str) -> None:
    """On the standard error, as everything but tables."""
    print(text, file=sys.stderr, flush=True)
