"""Oracle: what the answer will attend to, known beforehand."""

from dataclasses import dataclass

from torch import Tensor

from scorers.base import LayerView, Needs, Scorer
from scorers.h2o import column_mass
from scorers.snapkv import reduce_group


@dataclass(frozen=True)
class Oracle(Scorer):
    """Mean attention that the full cache's own answer gives to each prompt token.

    `s_j = mean_{t in answer} P[t, j]`, P the softmax over the prompt's keys only: tokens of the answer are always kept
    and compete with none, so attention among them says nothing about the prompt.

    No method: the queries exist only after the full cache has answered. It bounds what a score of attention, token
    by token, can know; the set that would change the answer least may still be another.

    Parameters
    ----------
    window
        Recent tokens that are always kept, 32 as in the scorers it bounds; 0 ranks them too.
    group
        How the query heads that share a KV head are reduced: `mean`, `max` or `sum`.
    """

    group: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group not in ("mean", "max", "sum"):
            raise ValueError(f"group must be mean, max or sum, not {self.group!r}")

    @property
    def needs(self) -> Needs:
        """The answer's queries."""
        return Needs(answer=True)

    def score(self, layer: LayerView) -> Tensor:
        """Attention of the answer to the past, [G, n - window]; zeros if the answer asked nothing (one token)."""
        mass = column_mass(layer.answer_queries, layer.keys, layer.scaling) / max(1, layer.answer_queries.shape[1])
        return reduce_group(mass[:, : layer.n - self.window].unflatten(0, (layer.keys.shape[0], -1)), self.group)
