"""Random: what any score has to beat."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scorers.base import LayerView, Scorer


@dataclass(frozen=True)
class Random(Scorer):
    """Uniform random scores, independent for each token and KV head: the control without any knowledge.

    With the window of SnapKV it shows how much of a result the protected window alone explains. Scores depend on
    `seed`, prompt length, layer and head only: they are drawn on the CPU and equal on every device. Two prompts of the
    same length keep the same positions.

    Parameters
    ----------
    window
        Recent tokens that are always kept.
    seed
        Another number gives another draw.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, not {self.seed}")

    def score(self, layer: LayerView) -> Tensor:
        """Numbers in [0, 1), [G, n - window]; a token's does not depend on the window."""
        generator = np.random.default_rng([self.seed, layer.n, layer.layer])
        drawn = generator.random((layer.keys.shape[0], layer.n), dtype=np.float32)
        return torch.from_numpy(drawn)[:, : layer.n - self.window].to(layer.keys.device)
