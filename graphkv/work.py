"""What a command asks for and what of it is stored: the cells that share their prefills, and their records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval import tasks
from eval.errors import UserError
from eval.records import CellStore, key_of
from eval.samples import Sample, Task
from graphkv.config import CellSettings, RunConfig
from graphkv.models import ModelInfo, inspect

Shard = tuple[int, int]
"""(number, count): every `count`-th sample, beginning with the one of that number."""


@dataclass(frozen=True)
class Group:
    """Cells that can be cut from the same prefills.

    Attributes
    ----------
    config
        The settings that the cells share (its `cell` is the first one's).
    info
        The model; its weights are loaded when there is something to do.
    task
        The task with the samples that are asked for.
    cells
        The distinct cells, in the order of the command.
    stores
        For each cell, the stores of its records by name of the task.
    shard
        The part of the samples that this process does; None for all.
    """

    config: RunConfig
    info: ModelInfo
    task: Task
    cells: list[CellSettings]
    stores: list[dict[str, CellStore]]
    shard: Shard | None = None

    @classmethod
    def prepare(cls, configs: Sequence[RunConfig], shard: Shard | None = None) -> Group:
        """Load, check and list everything; nothing is written yet."""
        first = configs[0]
        model, info = first.model, inspect(first.model)
        task = tasks.build(
            first.task,
            first.protocol,
            info.tokenizer,
            family=model.known_family,
            max_positions=info.max_positions,
            stop_ids=info.stop_ids,
            limit=first.limit,
            partial=first.partial,
        )
        if task.measure != "answer" and first.decode.evict_every is not None:
            raise UserError(f"decode.evict_every evicts while an answer is written, and task {task.name} has none")
        shared = {
            "model": {
                "name": model.label,
                "weights": info.weights_hash,
                "dtype": model.dtype,
                "attention": model.attention,
                "device": info.device,
            },
            "decode": {"mode": first.decode.mode, "evict_every": first.decode.evict_every},
            "prefill": asdict(first.prefill),
        }
        root = Path(first.results_dir) / model.label / task.name
        cut = key_of({"samples": [sample.id for sample in task.samples]})[:8]
        cells = list(dict.fromkeys(config.cell for config in configs))
        stores = [
            {
                name: CellStore(
                    root if name == task.name else root / name,
                    cell.label,
                    {**shared, "task": {"name": name, **identity}, "cell": cell.describe()},
                    shard,
                    cut,
                )
                for name, identity in task.identity.items()
            }
            for cell in cells
        ]
        return cls(first, info, task, cells, stores, shard)

    @property
    def all_stores(self) -> list[CellStore]:
        """Stores in one order for all processes, so that two that share cells cannot wait for each other."""
        return sorted((store for by_task in self.stores for store in by_task.values()), key=lambda store: store.folder)

    @property
    def samples(self) -> list[Sample]:
        """The samples that this process is to do."""
        number, count = self.shard or (0, 1)
        return list(self.task.samples[number::count])

    def store(self, cell: int, sample: Sample) -> CellStore:
        """Where the record of a sample and the cell of that number goes."""
        return self.stores[cell][sample.task]

    def records(self, cell: int) -> dict[str, dict[str, Any]]:
        """Records of a cell by sample id: of the samples that are asked for, and of others done earlier."""
        return {key: record for store in self.stores[cell].values() for key, record in store.records.items()}

    def missing(self) -> list[tuple[Sample, list[int]]]:
        """Samples with the numbers of the cells that have no result for them."""
        work = [
            (sample, [cell for cell in range(len(self.cells)) if not self.store(cell, sample).done(sample.id)])
            for sample in self.samples
        ]
        return [(sample, cells) for sample, cells in work if cells]


def groups_of(configs: Sequence[RunConfig], shard: Shard | None = None) -> list[Group]:
    """The groups of a command: all are checked before the first one writes anything."""
    together: dict[str, list[RunConfig]] = {}
    for config in configs:
        shared = [asdict(config.model), config.task, config.protocol, asdict(config.decode)]
        shared += [asdict(config.prefill), config.name, config.results_dir, config.limit, config.partial]
        together.setdefault(key_of({"shared": shared}), []).append(config)
    return [Group.prepare(group, shard) for group in together.values()]
