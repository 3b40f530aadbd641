"""The sweeper: Hydra's basic one, which composes every job once instead of twice."""

from __future__ import annotations

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper


class GridSweeper(BasicSweeper):
    """All combinations of the listed values; its settings are in `conf/hydra/sweeper/grid.yaml`."""

    def validate_batch_is_legal(self, batch: list[list[str]]) -> None:
        """Nothing: the launcher composes all jobs before the first one runs, and a bad one is found there."""
