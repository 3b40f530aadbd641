"""Hydra launcher `grid`: the jobs of a multirun become cells of one pass over the samples."""

from hydra_plugins.graphkv_grid.launcher import GridLauncher

__all__ = ["GridLauncher"]
