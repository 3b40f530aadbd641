"""The launcher itself: compose every job, hand all of them to `graphkv.grid` together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


@dataclass
class GridConfig:
    """Node of the config group `hydra/launcher`."""

    _target_: str = "hydra_plugins.graphkv_grid.launcher.GridLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="grid", node=GridConfig, provider="graphkv")


class GridLauncher(Launcher):
    """Runs all jobs of a multirun in this process, as one grid."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what Hydra hands over; see `hydra.plugins.launcher.Launcher`."""
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job's configuration and run them as the cells of one grid."""
        from graphkv import grid  # Hydra imports all plugins at start, also for --help and completion

        jobs = []
        for overrides in job_overrides:
            job = self.loader.load_sweep_config(self.config, list(overrides))
            with open_dict(job):
                del job["hydra"]
            jobs.append(job)
        grid.main(jobs)
        returns = []
        for number, (job, overrides) in enumerate(zip(jobs, job_overrides, strict=True), initial_job_idx):
            done = JobReturn(overrides=list(overrides), cfg=OmegaConf.create(job), status=JobStatus.COMPLETED)
            done.working_dir, done.task_name, done._return_value = ".", f"cell-{number}", None
            returns.append(done)
        return returns
