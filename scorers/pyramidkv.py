"""PyramidKV: SnapKV's scores, more budget for lower layers."""

from dataclasses import dataclass
from typing import ClassVar

from scorers.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's score under a budget that falls linearly from the first layer to the last.

    Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" (2024), section
    4; reference code `Zefan-Cai/KVCache-Factory`. The budget rule is `graphkv.budgets.pyramid`.

    Parameters
    ----------
    beta
        The last layer's past budget is the mean past budget divided by `beta`.
    schedule
        `official`: the reference's integers, whose sum exceeds the budget (by 11 % at budget 128, window 32,
        32 layers); `exact`: the same line, rounded so that the layers sum to exactly `budget * n_layers`.
    """

    beta: int = 20
    schedule: str = "official"

    budget_rule: ClassVar[str] = "pyramid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError(f"beta must be 1 or more, not {self.beta}")
        if self.schedule not in ("official", "exact"):
            raise ValueError(f"schedule must be official or exact, not {self.schedule!r}")
