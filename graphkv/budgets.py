"""How many tokens each layer keeps, window included, and how a layer's share is spread over its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphkv.selection import top_positions
from scorers import LayerView, Scorer


def resolve(budget: int | float, n: int, window: int) -> int:
    """Tokens to keep of an `n`-token prompt: a token budget as it is, a ratio of `n` rounded down.

    A ratio never goes below the window, nor below one token. The small addend undoes binary fractions that fall
    short (0.29 * 100 = 28.999…).
    """
    if isinstance(budget, int):
        return budget
    return max(1, window, int(budget * n + 1e-9))


def uniform(scorer: Scorer, budget: int, n: int, layers: Sequence[LayerView]) -> list[int]:
    """The same budget for every layer."""
    return [budget] * len(layers)


def pyramid(scorer: Scorer, budget: int, n: int, layers: Sequence[LayerView]) -> list[int]:
    """PyramidKV's falling line (KVCache-Factory, `PyramidKVCluster.update_kv`).

    With B the budget without the window: the last layer keeps `B / beta` past tokens, the first as many more than
    B as the last keeps fewer, clipped to the `n - window` that exist. `schedule="official"` uses the reference's
    integer divisions and its uniform branch for prompts shorter than 2B; the floor of the step makes the sum
    exceed `budget * n_layers`. `schedule="exact"` rounds the line by largest remainders to exactly that sum.
    """
    n_layers, base, past = len(layers), budget - scorer.window, n - scorer.window
    if n_layers == 1 or base == 0:
        return [budget] * n_layers
    low = base // scorer.beta if scorer.schedule == "official" else base / scorer.beta
    high = 2 * base - low
    if high > past:
        high, low = past, 2 * base - past
    if scorer.schedule == "official":
        if n < 2 * base:
            return [budget] * n_layers
        step = (high - low) // (n_layers - 1)
        return [high - layer * step + scorer.window for layer in range(n_layers)]
    line = [high - layer * (high - low) / (n_layers - 1) for layer in range(n_layers)]
    whole = [int(value) for value in line]
    by_remainder = sorted(range(n_layers), key=lambda layer: (whole[layer] - line[layer], layer))
    for layer in by_remainder[: base * n_layers - sum(whole)]:
        whole[layer] += 1
    return [value + scorer.window for value in whole]


def cake(scorer: Scorer, budget: int, n: int, layers: Sequence[LayerView]) -> list[int]:
    """Past tokens in proportion to what each layer asks for (`antgroup/cakekv`, `CakeprefillKVCache`).

    With `scorer.cascading` the whole budget is shared anew after each layer among the layers read so far, and a layer
    keeps the least that it ever got. What it gave up is lost, so the sum can stay below `budget * n_layers`.
    """
    window, n_past = scorer.window, n - scorer.window
    total = (budget - window) * len(layers)
    preferences = [scorer.preference(layer) for layer in layers]
    if not scorer.cascading:
        return [window + past for past in shares(preferences, total, n_past)]
    held: list[int] = []
    for seen in range(1, len(layers) + 1):
        stage = shares(preferences[:seen], total, n_past)
        held = [min(pair) for pair in zip([*held, n_past], stage, strict=True)]
    return [window + past for past in held]


def shares(preferences: Sequence[float], total: int, cap: int) -> list[int]:
    """Split `total` in proportion to `preferences`, no share above `cap` (`cakekv`, `adjust_budgets`).

    Shares are rounded down and cut at the cap; what was cut off, then what rounding left, goes in equal parts to those
    below the cap, the remainder one each to the first of them. The reference stops here, and loses what the parts
    exceed the cap by; this goes on until the sum is `total`, or every share is at the cap. All-zero preferences are
    equal preferences.
    """
    if not any(preferences):
        preferences = [1.0] * len(preferences)
    whole = sum(preferences)
    wanted = [int(preference / whole * total) for preference in preferences]
    result = [min(share, cap) for share in wanted]
    result = _hand_out(result, sum(wanted) - sum(result), cap)
    while sum(result) < min(total, cap * len(result)):
        result = _hand_out(result, total - sum(result), cap)
    return result


def _hand_out(result: list[int], amount: int, cap: int) -> list[int]:
    """Shares with `amount` added in equal parts to those below the cap, and cut at it."""
    below = [i for i, share in enumerate(result) if share < cap]
    result = list(result)
    for place, i in enumerate(below):
        result[i] = min(cap, result[i] + amount // len(below) + (place < amount % len(below)))
    return result


RULES: dict[str, Callable[[Scorer, int, int, Sequence[LayerView]], list[int]]] = {
    "uniform": uniform,
    "pyramid": pyramid,
    "cake": cake,
}


def per_layer(scorer: Scorer, budget: int | float, n: int, layers: Sequence[LayerView]) -> list[int]:
    """Tokens that each layer keeps of an `n`-token prompt, by the scorer's own rule.

    Parameters
    ----------
    scorer
        Names the rule and the window.
    budget
        Tokens (int) or a share of the prompt (float in (0, 1]), window included.
    n
        Prompt length in tokens.
    layers
        Layers of the prefilled prompt, bottom first. Rules that need their number only do not look at them.

    Returns
    -------
    list of int
        One number a layer, bottom first, each at least `max(1, window)` and at most `n`. A prompt that fits the
        budget is kept whole.
    """
    tokens = resolve(budget, n, scorer.window)
    if scorer.keeps_all or n <= tokens:
        return [n] * len(layers)
    return RULES[scorer.budget_rule](scorer, tokens, n, layers)


def per_head(scores: Tensor, past_budget: int, floor: float = 0.2, normalize: bool = False) -> list[int]:
    """Past tokens that each head keeps when the heads of a layer compete (AdaKV).

    With c_h the tokens of head h among the best `heads * past_budget` of all heads, head h keeps
    `round( c_h (1 - floor) + int(past_budget * floor) )`.

    Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference"
    (NeurIPS 2025, arXiv 2407.11550), Algorithm 1; reference code `FFY0/AdaKV`, `AdaptiveSnapKVCluster.update_kv`, there
    on SnapKV's scores, pooled by maximum.

    Divergences: where rounding leaves the sum off `heads * past_budget`, single tokens go to (or come from) the
    heads that are furthest from their exact share, so that a layer stores what it would store without competition;
    no head is left without any past token; ties go to the lower position, then to the lower head.

    Parameters
    ----------
    scores
        [heads, n_past] float32, non-negative and comparable between heads.
    past_budget
        Mean past tokens a head, the window not included.
    floor
        α in [0, 1]: the share of the budget that each head has for sure. 0 is free competition, 1 none.
    normalize
        Multiply a head's scores by the share of their sum that its own best `past_budget` hold, as KVCache-Factory
        does by default and the reference does not.

    Returns
    -------
    list of int
        One number a head, at most `n_past`, summing to `heads * min(past_budget, n_past)`.
    """
    heads, n_past = scores.shape
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must be in [0, 1], not {floor}")
    if past_budget < 0:
        raise ValueError(f"past_budget must be 0 or more tokens, not {past_budget}")
    if past_budget >= n_past:
        return [n_past] * heads
    if normalize:
        best = scores.topk(past_budget).values.sum(-1, keepdim=True)
        scores = scores * (best / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny))
    winners = top_positions(scores.T.reshape(1, -1), heads * past_budget)[0] % heads
    counts = torch.bincount(winners, minlength=heads).tolist()
    exact = [count * (1 - floor) + past_budget * floor for count in counts]
    least = min(1, past_budget)
    kept = [max(least, round(count * (1 - floor) + int(past_budget * floor))) for count in counts]
    while missing := heads * past_budget - sum(kept):
        step = 1 if missing > 0 else -1
        movable = [head for head in range(heads) if least <= kept[head] + step <= n_past]
        kept[max(movable, key=lambda head: step * (exact[head] - kept[head]))] += step
    return kept
