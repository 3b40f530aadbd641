"""Scorers as loops over float64 numbers."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor


def softmax_row(logits: list[float]) -> list[float]:
    """exp / sum over one row, `-inf` allowed."""
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    total = sum(powers)
    return [p / total for p in powers]


def window_mass(queries: Tensor, keys: Tensor, scaling: float, window: int) -> np.ndarray:
    """Attention mass [H, n] that the last `window` positions give to every position, each causal."""
    q, k = queries[:, -window:].double().numpy(), keys.double().numpy()
    heads, n = q.shape[0], k.shape[1]
    group = heads // k.shape[0]
    mass = np.zeros((heads, n))
    for h in range(heads):
        for row in range(q.shape[1]):
            position = n - q.shape[1] + row
            logits = (k[h // group, : position + 1] @ q[h, row]) * scaling
            mass[h, : position + 1] += softmax_row(list(logits))
    return mass


def pooled(row: np.ndarray, kernel: int, how: str) -> np.ndarray:
    """Pooling with zero padding counted in the mean, and nothing outside in the maximum."""
    half = kernel // 2
    out = np.zeros_like(row)
    for j in range(len(row)):
        inside = [row[i] for i in range(j - half, j + half + 1) if 0 <= i < len(row)]
        out[j] = sum(inside) / kernel if how == "avg" else max(inside)
    return out


def snapkv(queries, keys, scaling, window, kernel, pooling, group_how) -> np.ndarray:
    """SnapKV scores [G, n - window]."""
    mass = window_mass(queries, keys, scaling, window)[:, : keys.shape[1] - window]
    group = queries.shape[0] // keys.shape[0]
    rows = []
    for g in range(keys.shape[0]):
        members = mass[g * group : (g + 1) * group]
        row = {"mean": members.mean(0), "max": members.max(0), "sum": members.sum(0)}[group_how]
        rows.append(row if pooling == "none" else pooled(row, kernel, pooling))
    return np.stack(rows)


def knorm(keys: Tensor, window: int, positive: str = "inverse") -> np.ndarray:
    """A decreasing positive map of the norms [G, n - window]."""
    past = keys.double().numpy()[:, : keys.shape[1] - window]
    norms = np.sqrt((past**2).sum(-1))
    if positive == "inverse":
        return 1 / norms
    if positive == "max_minus":
        return norms.max(1, keepdims=True) - norms
    if positive == "softmax":
        return np.array([softmax_row(list(-row)) for row in norms])
    n = norms.shape[1]
    better = [
        [sum(row[i] < row[j] or (row[i] == row[j] and i < j) for i in range(n)) for j in range(n)] for row in norms
    ]
    return 1 - np.array(better) / n


def attention_rows(queries: Tensor, keys: Tensor, scaling: float, visible) -> np.ndarray:
    """Attention [H, t, n] of every query; `visible(row, column)` says what a query may see."""
    q, k = queries.double().numpy(), keys.double().numpy()
    heads, t, n = q.shape[0], q.shape[1], k.shape[1]
    group = heads // k.shape[0]
    rows = np.zeros((heads, t, n))
    for h in range(heads):
        for row in range(t):
            seen = [visible(row, column) for column in range(n)]
            logits = k[h // group] @ q[h, row] * scaling
            rows[h, row] = softmax_row([x if s else -math.inf for x, s in zip(logits, seen, strict=True)])
    return rows


def by_group(scores: np.ndarray, kv_heads: int, how: str) -> np.ndarray:
    """[H, …] scores reduced to [G, …]."""
    members = scores.reshape(kv_heads, -1, *scores.shape[1:])
    return {"mean": members.mean(1), "max": members.max(1), "sum": members.sum(1)}[how]


def causal_mass(queries: Tensor, keys: Tensor, scaling: float) -> np.ndarray:
    """Mass [H, n] that every position gets from all queries that come after it, itself included."""
    return attention_rows(queries, keys, scaling, lambda row, column: column <= row).sum(1)


def h2o(queries, keys, scaling, window, causal, group_how) -> np.ndarray:
    """H2O scores [G, n - window] from all queries."""
    n = keys.shape[1]

    def visible(row, column):
        if causal:
            return column <= row
        return column <= row or not (row >= n - window and column >= n - window)

    mass = attention_rows(queries, keys, scaling, visible).sum(1)
    return by_group(mass, keys.shape[0], group_how)[:, : n - window]


def window_rows(queries: Tensor, keys: Tensor, scaling: float, window: int) -> np.ndarray:
    """Attention [H, window, n] of the last `window` positions."""
    n = keys.shape[1]
    return attention_rows(
        queries[:, -window:], keys, scaling, lambda row, column: column <= n - min(window, queries.shape[1]) + row
    )


def cake(queries, keys, scaling, window, kernel, gamma, pooling="avg", group_how="mean") -> np.ndarray:
    """CAKE scores [G, n - window]."""
    rows = window_rows(queries, keys, scaling, window)[:, :, : keys.shape[1] - window]
    score = by_group(rows.mean(1) + gamma * rows.var(1, ddof=1), keys.shape[0], group_how)
    return score if pooling == "none" else np.stack([pooled(row, kernel, pooling) for row in score])


def cake_preference(queries, keys, scaling, window, tau1, tau2) -> float:
    """What a layer asks for."""
    rows = window_rows(queries, keys, scaling, window)[:, :, : keys.shape[1] - window]
    entropy = -sum(p * math.log(p + 1e-10) for p in rows.reshape(-1).tolist())
    variance = 0.0
    for h in range(rows.shape[0]):
        for j in range(rows.shape[2]):
            column = rows[h, :, j].tolist()
            mean = sum(column) / window
            variance += sum((p - mean) ** 2 for p in column) / (window - 1)
    return entropy ** (1 / tau1) * variance ** (1 / tau2)


def streamingllm(keys, window, sinks) -> np.ndarray:
    """Positions, sinks above all."""
    n = keys.shape[1]
    row = [n if j < sinks else j for j in range(n - window)]
    return np.array([row] * keys.shape[0], dtype=float)


def tova(queries, keys, scaling, window) -> np.ndarray:
    """Mean attention of the last query over all heads, one row for all KV heads."""
    mean = window_rows(queries, keys, scaling, 1)[:, 0].mean(0)[: keys.shape[1] - window]
    return np.stack([mean] * keys.shape[0])


def keydiff(keys, window) -> np.ndarray:
    """One minus the cosine of each key with the mean unit key."""
    k = keys.double().numpy()
    scores = []
    for head in k:
        unit = [row / np.linalg.norm(row) for row in head]
        anchor = sum(unit) / len(unit)
        scores.append([1 - u @ anchor / np.linalg.norm(anchor) for u in unit[: len(unit) - window]])
    return np.array(scores)


def lagkv(keys, values, window, sinks, lag, value_weight, across) -> np.ndarray:
    """LagKV as one ranking: sinks, tail, and each block against the next."""
    n = keys.shape[1]
    scores = np.array([[2.0 if j < sinks else 1 + j / n for j in range(n)]] * keys.shape[0])
    blocks = []
    begin = sinks
    while begin + 2 * lag <= n:
        blocks.append(begin)
        begin += lag
    for g in range(keys.shape[0]):
        for begin in blocks:
            total = np.zeros(lag)
            for x, weight in ((keys[g], 1.0), (values[g], value_weight)):
                x = x.double().numpy()
                following = x[begin + lag : begin + 2 * lag]
                low, high = following.min(0), following.max(0)
                spreads = []
                for row in x[begin : begin + lag]:
                    scaled = [(v - a) / (b - a) if b > a else 0.0 for v, a, b in zip(row, low, high, strict=True)]
                    spreads.append(np.std(scaled, ddof=1))
                total += weight * np.array(softmax_row(spreads))
            for j in range(lag):
                better = sum(total[i] > total[j] or (total[i] == total[j] and i < j) for i in range(lag))
                rank = (lag - 1 - better) / lag
                scores[g, begin + j] = rank if across == "rank" else total[j] / (1 + value_weight)
    return scores[:, : n - window]


def rotation(cos: np.ndarray, sin: np.ndarray, d: int) -> np.ndarray:
    """The d x d matrix that rotates a vector by one position's embedding (first len(cos) channels)."""
    r = len(cos)
    matrix = np.eye(d)
    for i in range(r // 2):
        a, b = i, i + r // 2
        matrix[a, a], matrix[a, b] = cos[a], -sin[a]
        matrix[b, a], matrix[b, b] = sin[b], cos[b]
    return matrix


def expected_attention(view, window, sinks, n_future, covariance, value_norms, epsilon, group):
    """Expected attention [G, n - window] with dense rotation matrices."""
    q, k, v = (x.double().numpy() for x in (view.queries, view.keys, view.values))
    cos, sin = view.rope.cos.double().numpy(), view.rope.sin.double().numpy()
    heads, (kv_heads, n, d) = q.shape[0], k.shape
    if n <= sinks:
        return np.ones((kv_heads, n - window))
    future = [rotation(cos[p], sin[p], d) for p in range(n, min(n + n_future, len(cos)))]
    average = sum(future) / len(future)
    attention = np.zeros((heads, n - sinks))
    for h in range(heads):
        raw = [np.linalg.inv(rotation(cos[p], sin[p], d)) @ q[h, p] for p in range(sinks, n)]
        mean = sum(raw) / len(raw)
        sigma = sum(np.outer(x - mean, x - mean) for x in raw) / len(raw)
        mean, sigma = average @ mean, average @ sigma @ average.T
        logits = []
        for key in k[h // (heads // kv_heads), sinks:]:
            logit = view.scaling * (mean @ key)
            if covariance:
                logit += 0.5 * view.scaling**2 * (key @ sigma @ key)
            logits.append(logit)
        attention[h] = softmax_row(logits)
    score = by_group(attention, kv_heads, group)
    if value_norms:
        score = (score + epsilon) * np.sqrt((v[:, sinks:] ** 2).sum(-1))
    first = np.repeat(2 * score.max(1, keepdims=True) + 1, sinks, 1)
    return np.concatenate([first, score], 1)[:, : n - window]


def rkv(
    queries, keys, scaling, window, kernel, weight, threshold, pooling="max", group_how="max", spare_last=True
) -> np.ndarray:
    """R-KV's published score λI − (1 − λ)R, which can be negative, [G, n - window]; similarities as one matrix."""
    q, k = queries[:, -window:].double().numpy(), keys.double().numpy()
    heads, (kv_heads, n, _) = q.shape[0], k.shape
    group = heads // kv_heads
    scores = []
    for g in range(kv_heads):
        importance = np.zeros(n - window)
        for row in range(window):
            logits = np.stack([k[g, : n - window] @ q[h, row] * scaling for h in range(g * group, (g + 1) * group)])
            importance += softmax_row(list(by_group(logits, 1, group_how)[0]))
        importance /= window
        if pooling != "none":
            importance = pooled(importance, kernel, pooling)
        unit = [row / (np.linalg.norm(row) + 1e-8) for row in k[g]]
        similarity = np.array([[0.0 if i == j else unit[i] @ unit[j] for j in range(n)] for i in range(n)])
        for i in range(n if spare_last else 0):
            alike = [j for j in range(n) if similarity[i, j] > threshold]
            similarity[i, max(alike, default=0)] = 0.0
        redundancy = np.array(softmax_row(list(similarity.mean(0))))[: n - window]
        scores.append(weight * importance - (1 - weight) * redundancy)
    return np.stack(scores)


def oracle(view, window, group_how) -> np.ndarray:
    """Mean attention of the answer's queries over the prompt's keys."""
    rows = attention_rows(view.answer_queries, view.keys, view.scaling, lambda row, column: True)
    return by_group(rows.mean(1), view.keys.shape[0], group_how)[:, : view.keys.shape[1] - window]


def autocorrelation(row: np.ndarray, distance: int) -> float:
    """Of a row at one distance, pairs beyond the ends counting as zero; 0 for a constant row."""
    x = row - row.mean()
    energy = sum(v * v for v in x)
    if np.ptp(row) == 0:
        return 0.0
    return sum(x[j] * x[j + distance] for j in range(len(x) - distance)) / energy


def spankv(queries, keys, values, scaling, window, widths, weights, mix) -> np.ndarray:
    """SpanKV scores [G, n - window]."""
    weights = [1.0] * len(widths) if not weights else weights
    attention = by_group(window_mass(queries, keys, scaling, window) / window, keys.shape[0], "mean")
    norms = np.sqrt((values.double().numpy() ** 2).sum(-1))
    rows = []
    for u in (attention * norms)[:, : keys.shape[1] - window]:
        scales = [pooled(u, width, "avg") for width in widths]
        share = [weight / sum(weights) for weight in weights]
        if mix == "quota":
            order = [sorted(range(len(u)), key=lambda j: (-scale[j], j)) for scale in scales]
            rows.append([max(c / (o.index(j) + 1) for c, o in zip(share, order, strict=True)) for j in range(len(u))])
            continue
        if mix == "head":
            for place, width in enumerate(widths):
                distances = range(1, (width - 1) // 2 + 1)
                if width > 1:
                    share[place] *= max(0, sum(autocorrelation(np.sqrt(u), d) for d in distances) / len(distances))
        total = sum(share)
        rows.append(sum(c / total * scale for c, scale in zip(share, scales, strict=True)) if total else 0 * u)
    return np.array(rows)
