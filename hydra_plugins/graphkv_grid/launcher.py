"""The launcher itself: compose every job, hand all of them to `graphkv.shards` together."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


class GridLauncher(Launcher):
    """Runs all jobs of a multirun as one grid; its settings are in `conf/hydra/launcher/grid.yaml`."""

    def __init__(self, **_: Any) -> None:
        """Hydra passes the settings of the command line as written; `launch` reads the composed ones."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what Hydra hands over; see `hydra.plugins.launcher.Launcher`."""
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job's configuration and run them as the cells of one grid."""
        from graphkv import shards  # Hydra imports all plugins at start, also for --help and completion

        jobs = [self.loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        job_overrides = [*job_overrides, *further(jobs[0].get("also") or [], job_overrides)]
        jobs += [self.loader.load_sweep_config(self.config, list(more)) for more in job_overrides[len(jobs) :]]
        launcher = OmegaConf.create(OmegaConf.to_container(jobs[0].hydra.launcher, resolve=True))
        for job in jobs:
            with open_dict(job):
                del job["hydra"]
        shards.main(jobs, launcher)
        returns = []
        for number, (job, overrides) in enumerate(zip(jobs, job_overrides, strict=True), initial_job_idx):
            done = JobReturn(overrides=list(overrides), cfg=OmegaConf.create(job), status=JobStatus.COMPLETED)
            done.working_dir, done.task_name, done._return_value = ".", f"cell-{number}", None
            returns.append(done)
        return returns


def further(lines: Sequence[str], jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """The jobs of an experiment's `also`: sweeps that no product of its parameters holds.

    Parameters
    ----------
    lines
        A sweep each, as on a command line: `scorer=snapkv selector=mmr budget=128,256`.
    jobs
        The overrides of the jobs that there are; what all of them share holds for the further ones too, unless their
        line says otherwise.
    """
    shared = [override for override in jobs[0] if all(override in job for job in jobs)]
    parser, found = OverridesParser.create(), []
    for line in lines:
        parsed = parser.parse_overrides(shlex.split(line))
        own = {override.key_or_group for override in parsed}
        rest = [text for text in shared if parser.parse_override(text).key_or_group not in own]
        for batch in BasicSweeper.split_arguments(parsed, None):
            found += [[*rest, *overrides] for overrides in batch]
    return found
