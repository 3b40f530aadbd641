"""Studies: tables and figures that look inside the engine rather than at the records of a benchmark.

The configuration's `study` names one and holds its options, the fields of its class. A command runs it once for all its
cells of one model. Every study writes the numbers that it shows, and what made them, beside its table or figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from eval.errors import UserError
from eval.records import key_of
from graphkv.config import RunConfig, build
from graphkv.engine import Engine
from graphkv.models import ModelInfo, inspect
from graphkv.studies.latency import Table3
from graphkv.studies.memory import Table5
from graphkv.studies.observation import Fig2, Fig7


class Study(Protocol):
    """A table or figure; its fields are the options in `conf/experiment/<name>.yaml`."""

    def check(self, configs: Sequence[RunConfig]) -> None:
        """Refuse cells that the study has nothing to say of, with a `UserError`, before anything is loaded."""

    def run(self, engine: Engine, configs: Sequence[RunConfig]) -> Iterator[Path]:
        """Measure the cells of `configs`, which share model and options, and give the files as they are written."""


STUDIES: dict[str, type[Study]] = {"fig2": Fig2, "fig7": Fig7, "table3": Table3, "table5": Table5}


@dataclass(frozen=True)
class Job:
    """A study with the runs that it looks at, all of one model."""

    study: Study
    info: ModelInfo
    configs: list[RunConfig]


def jobs_of(configs: Sequence[RunConfig]) -> list[Job]:
    """The studies of a command, all checked before the first one runs.

    Raises
    ------
    UserError
        For an unknown study or option, and for whatever a study finds wrong with its cells.
    """
    together: dict[str, list[RunConfig]] = {}
    for config in configs:
        shared = [asdict(config.model), config.study, asdict(config.prefill), config.name, config.results_dir]
        together.setdefault(key_of({"shared": shared}), []).append(config)
    return [_job(group) for group in together.values()]


def _job(configs: list[RunConfig]) -> Job:
    options = configs[0].study
    name = options.get("name") if isinstance(options, Mapping) else options
    if not isinstance(options, Mapping) or name not in STUDIES:
        raise UserError(f"study is {name!r}: choose experiment={'|'.join(STUDIES)}, or null")
    study = build(STUDIES[name], {key: value for key, value in options.items() if key != "name"}, "study")
    study.check(configs)
    return Job(study, inspect(configs[0].model), configs)
