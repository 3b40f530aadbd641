"""How many tokens each layer keeps, window included."""

from __future__ import annotations

from collections.abc import Callable

from scorers import Scorer


def resolve(budget: int | float, n: int, window: int) -> int:
    """Tokens to keep of an `n`-token prompt: a token budget as it is, a ratio of `n` rounded down.

    A ratio never goes below the window, nor below one token. The small addend undoes binary fractions that fall
    short (0.29 * 100 = 28.999…).
    """
    if isinstance(budget, int):
        return budget
    return max(1, window, int(budget * n + 1e-9))


def uniform(scorer: Scorer, budget: int, n: int, n_layers: int) -> list[int]:
    """The same budget for every layer."""
    return [budget] * n_layers


def pyramid(scorer: Scorer, budget: int, n: int, n_layers: int) -> list[int]:
    """PyramidKV's falling line (KVCache-Factory, `PyramidKVCluster.update_kv`).

    With B the budget without the window: the last layer keeps `B / beta` past tokens, the first as many more than
    B as the last keeps fewer, clipped to the `n - window` that exist. `schedule="official"` uses the reference's
    integer divisions and its uniform branch for prompts shorter than 2B; the floor of the step makes the sum
    exceed `budget * n_layers`. `schedule="exact"` rounds the line by largest remainders to exactly that sum.
    """
    base, past = budget - scorer.window, n - scorer.window
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


RULES: dict[str, Callable[[Scorer, int, int, int], list[int]]] = {"uniform": uniform, "pyramid": pyramid}


def per_layer(scorer: Scorer, budget: int | float, n: int, n_layers: int) -> list[int]:
    """Tokens that each layer keeps of an `n`-token prompt, by the scorer's own rule.

    Parameters
    ----------
    scorer
        Names the rule and the window.
    budget
        Tokens (int) or a share of the prompt (float in (0, 1]), window included.
    n
        Prompt length in tokens.
    n_layers
        Layers of the model.

    Returns
    -------
    list of int
        One number a layer, bottom first, each at least `max(1, window)` and at most `n`. A prompt that fits the
        budget is kept whole.
    """
    tokens = resolve(budget, n, scorer.window)
    if scorer.keeps_all or n <= tokens:
        return [n] * n_layers
    return RULES[scorer.budget_rule](scorer, tokens, n, n_layers)
