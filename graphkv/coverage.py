"""Set objectives: tokens that together stand for the prompt, instead of the best ones each by itself.

docs/objective.md derives them, shows which half of a greedy step GraphKV's Eq. (5) is, and says what is known of their
use.
"""

from __future__ import annotations

import abc
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from graphkv.edges import Similarity
from graphkv.selection import keep, top_positions

NAMES = ("topk", "mmr", "coverage", "facility")
_CHOICES = {"name": NAMES, "kernel": ("kv", "k"), "center": ("mean", "baseline", "none")}
_BLOCK_ELEMENTS = 1 << 20  # products held at once: 4 MiB of float32
_KERNEL_ELEMENTS = 1 << 25  # similarities held at once: 128 MiB of float32, or those of one head
_KEPT_AT_ONCE = 256  # kept tokens that are compared with the candidates at a time
_LOOK_AHEAD = 8  # gains computed anew in a step of the lazy greedy


@dataclass(frozen=True)
class Selector:
    """How the kept set follows from the scores of a layer.

    The objective of a set S that a head keeps is `F(S) = (1 - λ) Σ_{i in S} p_i + λ C(S)`: p are the scores of the
    candidates divided by their sum, κ_ij in [0, 1] says how well token j stands for token i (κ_ii = 1), and C, what S
    stands for, is one of the below. Window and sinks are in S from the beginning; each step adds the candidate that
    raises F the most, of equals the one at the lower position. F is monotone and submodular, so the greedy F is at
    least 1 - 1/e of the best possible (Nemhauser, Wolsey, Fisher 1978). With λ = 0 all selectors are top-k.

    Parameters
    ----------
    name
        `topk`: the best scores. `coverage`: `C = Σ_i p_i (1 - Π_{j in S} (1 - κ_ij))`, probabilistic coverage.
        `facility`: `C = Σ_i p_i max_{j in S} κ_ij`, weighted facility location. `mmr`: no set function but a greedy
        rule, the largest `log p_j - λ max_{s in S} κ_js` (maximal marginal relevance, on a log scale).
    weight
        λ in [0, 1].
    kernel
        κ is the similarity of two tokens' keys (`k`) or that times the similarity of their values (`kv`): only tokens
        that agree in both can stand for each other.
    center
        Cosines with the head's mean subtracted (`mean`), measured from the head's average c (`baseline`:
        (cos - c) / (1 - c)), or as they are (`none`); negative ones are 0.
    power
        Exponent of κ: 4 leaves near-copies only.
    candidates
        The best so many times the layer's budget take part, as what is kept and as what is to be stood for.
    rounds
        Choose in so many rounds of equal size, each by the gains at its beginning; None: one token at a time, exact.
    """

    name: str = "topk"
    weight: float = 0.3
    kernel: str = "kv"
    center: str = "mean"
    power: float = 1.0
    candidates: int = 4
    rounds: int | None = None

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}, not {getattr(self, field)!r}")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be in [0, 1], not {self.weight}")
        if not 0 < self.power < float("inf"):
            raise ValueError(f"power must be positive, not {self.power}")
        if self.candidates < 1:
            raise ValueError(f"candidates must be 1 or more times the budget, not {self.candidates}")
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"rounds must be 1 or more or null, not {self.rounds}")

    def describe(self) -> dict[str, str | int | float | None]:
        """Everything that decides what is kept, as JSON values; nothing for `topk`, which was there first."""
        options = {} if self.name == "topk" else asdict(self)
        return {"selector" if option == "name" else f"selector_{option}": value for option, value in options.items()}


class Objective(abc.ABC):
    """What candidates gain a set that grows. Shapes: h heads, M candidates, which are also what is to be stood for.

    Parameters
    ----------
    p
        [h, M] float64, non-negative.
    weight
        λ.
    """

    def __init__(self, p: Tensor, weight: float) -> None:
        self.p, self.weight = p, weight

    @abc.abstractmethod
    def gains(self, kernel: Tensor, index: Tensor) -> Tensor:
        """What F gains by the candidates `index` [h, c], [h, c] float64.

        `kernel` [h, c, M] is their rows of κ. Sums over M are computed in its dtype.
        """

    def _mixed(self, index: Tensor, gain: Tensor) -> Tensor:
        """F gains `gain` [h, c, 1] of C, and the candidates' own weights."""
        return (1 - self.weight) * self.p.gather(-1, index) + self.weight * gain[..., 0]

    @abc.abstractmethod
    def add(self, kernel: Tensor) -> None:
        """Put tokens with the rows of κ `kernel` [h, c, M] into the set; a row of zeros adds nothing."""

    def value(self, chosen: Tensor) -> Tensor:
        """F of what was added, [h] float64; `chosen` [h, M] bool says which candidates are among it."""
        return (1 - self.weight) * (self.p * chosen).sum(-1) + self.weight * self.covered()

    @abc.abstractmethod
    def covered(self) -> Tensor:
        """C of what was added, [h] float64."""


class Coverage(Objective):
    """`C = Σ_i p_i (1 - r_i)` with the residual `r_i = Π_{j in S} (1 - κ_ij)`."""

    def __init__(self, p: Tensor, weight: float) -> None:
        super().__init__(p, weight)
        self.residual = torch.ones_like(p)

    def gains(self, kernel: Tensor, index: Tensor) -> Tensor:
        """`(1 - λ) p_j + λ Σ_i p_i r_i κ_ij`."""
        left = (self.p * self.residual).to(kernel.dtype)
        return self._mixed(index, kernel @ left[..., None])

    def add(self, kernel: Tensor) -> None:
        """Lower the residual of what resembles the new tokens."""
        self.residual *= (1 - kernel.double()).prod(1)

    def covered(self) -> Tensor:
        """Weight that is not left."""
        return (self.p * (1 - self.residual)).sum(-1)


class Facility(Objective):
    """`C = Σ_i p_i c_i` with `c_i = max_{j in S} κ_ij`, the similarity to the token that stands for i."""

    def __init__(self, p: Tensor, weight: float) -> None:
        super().__init__(p, weight)
        self.nearest = torch.zeros_like(p)

    def gains(self, kernel: Tensor, index: Tensor) -> Tensor:
        """`(1 - λ) p_j + λ Σ_i p_i max(0, κ_ij - c_i)`."""
        nearer = (kernel - self.nearest.to(kernel.dtype)[:, None]).clamp_min_(0)
        return self._mixed(index, nearer @ self.p.to(kernel.dtype)[..., None])

    def add(self, kernel: Tensor) -> None:
        """Let the new tokens stand for what they resemble most."""
        self.nearest = torch.cat([self.nearest[:, None], kernel.double()], 1).amax(1)

    def covered(self) -> Tensor:
        """Mean similarity to what stands for each."""
        return (self.p * self.nearest).sum(-1)


class MMR(Facility):
    """Maximal marginal relevance, `log p_j - λ c_j`, as the product `p_j exp(-λ c_j)`, which p = 0 does not break."""

    def gains(self, kernel: Tensor, index: Tensor) -> Tensor:
        """`p_j exp(-λ c_j)`: what similarity to the set leaves of a score."""
        return self.p.gather(-1, index) * (-self.weight * self.nearest.gather(-1, index)).exp()


OBJECTIVES: dict[str, type[Objective]] = {"mmr": MMR, "coverage": Coverage, "facility": Facility}


def all_gains(objective: Objective, kernel: Tensor) -> Tensor:
    """Gains of all candidates [h, M] in float32's precision; `kernel` is κ [h, M, M] float32."""
    heads, m = objective.p.shape
    index = torch.arange(m, device=kernel.device).expand(heads, -1)
    size = max(1, _BLOCK_ELEMENTS // (heads * m))
    blocks = zip(kernel.split(size, 1), index.split(size, 1), strict=True)
    return torch.cat([objective.gains(rows, block) for rows, block in blocks], -1)


def lazy_greedy(objective: Objective, kernel: Tensor, count: int) -> Tensor:
    """The `count` candidates that greedy adds one at a time, [h, count] int64 ascending.

    Gains only shrink, so that old ones are bounds: a candidate whose gain, computed anew, is still the largest bound is
    the best (Minoux 1978). Heads go on independently of each other.

    Parameters
    ----------
    objective
        With what is always kept added; it is changed.
    kernel
        κ between the candidates [h, M, M] float32.
    count
        At most M.
    """
    heads, m = objective.p.shape
    row = torch.arange(heads, device=kernel.device)[:, None]
    bounds = all_gains(objective, kernel) * (1 + 2 * m * torch.finfo(kernel.dtype).eps)
    chosen = torch.zeros_like(bounds, dtype=torch.bool)
    ahead = _LOOK_AHEAD
    while (unfinished := chosen.sum(-1, keepdim=True) < count).any():
        # The first maximum is the lowest position; topk may leave it out where many are equal.
        index = torch.cat([bounds.argmax(-1, keepdim=True), bounds.topk(min(ahead, m)).indices], -1)
        fresh = objective.gains(kernel[row, index].double(), index).masked_fill_(chosen.gather(-1, index), -1)
        best = bounds.scatter_(-1, index, fresh).argmax(-1, keepdim=True)
        settled = (index == best).any(-1, keepdim=True)
        ahead = _LOOK_AHEAD if settled.all() else 2 * ahead
        settled &= unfinished
        objective.add(kernel[row, best] * settled[..., None])
        chosen.scatter_(-1, best, settled | chosen.gather(-1, best))
        bounds.masked_fill_(chosen, -1)
    return _positions(chosen, count)


def batched_greedy(objective: Objective, kernel: Tensor, count: int, rounds: int) -> Tensor:
    """Like `lazy_greedy`, but in `rounds` rounds; tokens of one round do not know of each other."""
    row = torch.arange(len(kernel), device=kernel.device)[:, None]
    chosen = torch.zeros(kernel.shape[:2], dtype=torch.bool, device=kernel.device)
    rounds = min(rounds, count)
    for number in range(rounds):
        size = count * (number + 1) // rounds - count * number // rounds
        best = top_positions(all_gains(objective, kernel).masked_fill_(chosen, -1), size)
        objective.add(kernel[row, best])
        chosen.scatter_(-1, best, True)
    return _positions(chosen, count)


def _positions(chosen: Tensor, count: int) -> Tensor:
    return chosen.nonzero()[:, 1].view(len(chosen), count)


class Kernel:
    """κ between tokens of a layer; parameters as for `select`."""

    def __init__(self, keys: Tensor, values: Tensor, selector: Selector) -> None:
        features = (keys, values) if selector.kernel == "kv" else (keys,)
        self.parts = [Similarity(part, part, len(part), selector.center) for part in features]
        self.power = selector.power

    def between(self, a: Tensor, b: Tensor) -> Tensor:
        """κ [h, x, y] float32 of positions [h, x] and [h, y]; 1 where they are the same."""
        row = torch.arange(len(a), device=a.device)[:, None]
        kernel, *others = (part.weigh(part.senders[row, a] @ part.senders[row, b].mT) for part in self.parts)
        for other in others:
            kernel.mul_(other)
        if self.power != 1:
            kernel.pow_(self.power)
        return kernel.masked_fill_(a[..., None] == b[:, None], 1)


class Problem:
    """What a layer has to choose from; parameters as for `select`.

    Attributes
    ----------
    candidates
        [h, M] int64 ascending positions: the best of the past by score, sinks excepted.
    kernel
        κ between any tokens.
    objective
        Of the candidates, with nothing added yet.
    """

    def __init__(
        self, scores: Tensor, keys: Tensor, values: Tensor, selector: Selector, budget: int, sinks: int
    ) -> None:
        m = min(scores.shape[-1] - sinks, selector.candidates * budget)
        self.candidates = sinks + top_positions(scores[:, sinks:], m)
        p = scores.gather(-1, self.candidates).double().clamp_min_(0)
        p = p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
        self.objective = OBJECTIVES[selector.name](p, selector.weight)
        self.kernel = Kernel(keys, values, selector)

    def add(self, positions: Tensor) -> None:
        """Put the tokens at [h, x] positions into the set."""
        for block in positions.split(_KEPT_AT_ONCE, -1):
            self.objective.add(self.kernel.between(block, self.candidates))

    def similarities(self) -> Tensor:
        """κ between the candidates, [h, M, M] float32."""
        heads, m = self.candidates.shape
        kernel = torch.empty(heads, m, m, device=self.candidates.device)
        size = max(1, _BLOCK_ELEMENTS // (heads * m))
        for rows, block in zip(kernel.split(size, 1), self.candidates.split(size, 1), strict=True):
            rows.copy_(self.kernel.between(block, self.candidates))
        return kernel


def select(scores: Tensor, keys: Tensor, values: Tensor, selector: Selector, budget: int, sinks: int = 0) -> Tensor:
    """Kept prompt positions of a layer, as `graphkv.selection.keep` gives them, chosen by an objective.

    Parameters
    ----------
    scores
        [h, n_past] float32 scores of the past.
    keys, values
        [h, n, d] of all prompt tokens, any float dtype; the tokens from `n_past` on are the window.
    selector
        The objective, `topk` excepted.
    budget
        Tokens to keep, window and sinks included; at least the window, less than n.
    sinks
        The first so many tokens are kept always, as far as the budget goes.

    Returns
    -------
    Tensor
        [h, budget] int64, ascending. Memory is that of κ for as many heads as 128 MiB hold, or for one head: 4 M² bytes
        each, M the candidates.
    """
    n, n_past = keys.shape[1], scores.shape[1]
    sinks = min(sinks, budget - (n - n_past))
    count = budget - (n - n_past) - sinks
    if count == 0:
        return keep(scores, budget, n, sinks)
    kept = []
    heads = max(1, _KERNEL_ELEMENTS // min(n_past, selector.candidates * budget) ** 2)
    for part in zip(*(x.split(heads) for x in (scores, keys, values)), strict=True):
        problem = Problem(*part, selector, budget, sinks)
        positions = torch.arange(n, device=scores.device).expand(len(part[0]), -1)
        first, window = positions[:, :sinks], positions[:, n_past:]
        problem.add(torch.cat([first, window], -1))
        kernel = problem.similarities()
        if selector.rounds is None:
            chosen = lazy_greedy(problem.objective, kernel, count)
        else:
            chosen = batched_greedy(problem.objective, kernel, count, selector.rounds)
        kept.append(torch.cat([first, problem.candidates.gather(-1, chosen), window], -1))
    return torch.cat(kept)


def value(scores: Tensor, keys: Tensor, values: Tensor, selector: Selector, kept: Tensor, sinks: int = 0) -> Tensor:
    """The objective F of any kept set, with the candidates that its size stands for.

    Parameters
    ----------
    scores, keys, values, selector, sinks
        As for `select`; the selector is `coverage` or `facility`, since `mmr` maximises nothing.
    kept
        [h, budget] int64 kept positions.

    Returns
    -------
    Tensor
        [h] float64 in [0, 1]: 1 if every candidate is kept.
    """
    if selector.name not in ("coverage", "facility"):
        raise ValueError(f"{selector.name} has no objective: coverage and facility have one")
    problem = Problem(scores, keys, values, selector, kept.shape[-1], sinks)
    problem.add(kept)
    return problem.objective.value((kept[..., None] == problem.candidates[:, None]).any(1))
