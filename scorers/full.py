"""Full cache: the reference that evicts nothing."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from scorers.base import LayerView, Scorer


@dataclass(frozen=True)
class Full(Scorer):
    """Keep every token. Budget and graph do not apply."""

    window: int = 0

    keeps_all: ClassVar[bool] = True

    def score(self, layer: LayerView) -> Tensor:
        """Ones: every past token is as important as any other."""
        shape = (layer.keys.shape[0], layer.n - self.window)
        return torch.ones(shape, dtype=torch.float32, device=layer.keys.device)
