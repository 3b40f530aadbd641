"""Eviction while the answer is written, against a step-by-step reference in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import scorers
from eval.errors import UserError
from graphkv.attention import forward
from graphkv.config import cell_settings
from scorers import ALL_QUERIES, Needs

BUDGET, STEPS = 40, 14


class NaiveState:
    """Attention over plain lists of keys and values, with the published rule applied after every token.

    tova: keep the `BUDGET` tokens with the largest mean attention of the newest query. h2o: add the newest query's
    attention to the running mass; keep the last `window` tokens and the heaviest others.
    """

    def __init__(self, prompt, kept, method, window):
        self.method, self.window = method, window
        self.layers = []
        for view, positions in zip(prompt.layers, kept, strict=True):
            heads = []
            for head, own in enumerate(positions.tolist()):
                mass = [view.mass[2 * head : 2 * head + 2, j].double().mean().item() for j in own]
                keys = [view.keys[head, j].double().numpy() for j in own]
                values = [view.values[head, j].double().numpy() for j in own]
                heads.append({"keys": keys, "values": values, "mass": mass})
            self.layers.append(heads)

    def attend(self, module, query, key, value, scaling):
        output, heads = torch.zeros_like(query), self.layers[module.layer_idx]
        rows = []
        for head, cached in enumerate(heads):
            cached["keys"].append(key[0, head, 0].double().numpy())
            cached["values"].append(value[0, head, 0].double().numpy())
            cached["mass"].append(0.0)
            attention = []
            for q in (2 * head, 2 * head + 1):
                logits = [float(query[0, q, 0].double().numpy() @ k) * scaling for k in cached["keys"]]
                powers = [math.exp(x - max(logits)) for x in logits]
                attention.append([p / sum(powers) for p in powers])
                output[0, q, 0] = torch.from_numpy(np.average(cached["values"], axis=0, weights=attention[-1]))
            rows.append(np.mean(attention, axis=0))
            cached["mass"] = [m + a for m, a in zip(cached["mass"], rows[-1], strict=True)]
        for cached in heads:
            score = list(np.mean(rows, axis=0)) if self.method == "tova" else cached["mass"]
            past = len(score) - self.window
            best = sorted(range(past), key=lambda j: (-score[j], j))[: BUDGET - self.window]
            keep = sorted(best) + list(range(past, len(score)))
            for name in ("keys", "values", "mass"):
                cached[name] = [cached[name][j] for j in keep]
        return output


@pytest.fixture(scope="module")
def read(tiny, essay):
    """200 bytes with everything recorded."""
    return tiny.prefill(essay[400:599], needs=Needs(queries=ALL_QUERIES, mass=True))


@pytest.mark.parametrize(("method", "window"), [("tova", 0), ("tova", 1), ("h2o", 8)])
def test_evicting_each_step_equals_the_reference(tiny, read, method, window):
    cell = tiny.compress(read, method, BUDGET, scorer_options={"window": window})
    (answer,) = tiny.decode(read, [cell], max_new_tokens=STEPS, stop_ids=(), evict_every=1)
    state, tokens = NaiveState(read, cell.kept, method, window), [int(read.logits.argmax())]
    with torch.inference_mode():
        for step in range(STEPS - 1):
            logits = forward(tiny.model, torch.tensor([tokens[-1:]]), read.n + step, state)
            tokens.append(int(logits[0, -1].argmax()))
    assert answer.ids == tokens
    grown = tiny.decode(read, [cell], max_new_tokens=STEPS, stop_ids=())[0].ids
    assert grown[:2] == tokens[:2]  # nothing was evicted before the second token


@pytest.mark.parametrize("every", [1, 5])
def test_batch_equals_solo_with_eviction(tiny, read, every):
    settings = [
        cell_settings("tova", 30),
        cell_settings("h2o", 60, {"neighbors": 3}),
        cell_settings("cake", 48, granularity="query_head"),
        cell_settings("rkv", 50),
        cell_settings("full", 1.0),
        cell_settings("tova", 44, scorer_options={"sinks": 4, "skip_layers": (1,)}),
    ]
    cells = [tiny.cut(read, each) for each in settings]
    options = {"max_new_tokens": 24, "evict_every": every}
    free = tiny.decode(read, cells, stop_ids=(), **options)
    stop = {free[0].ids[7], free[3].ids[11]}  # rows leave the batch in the middle
    batch = tiny.decode(read, cells, stop_ids=stop, **options)
    solo = tiny.decode(read, cells, stop_ids=stop, mode="solo", **options)
    assert [answer.ids for answer in batch] == [answer.ids for answer in solo]
    assert len({len(answer.ids) for answer in batch}) > 1


@pytest.mark.parametrize("name", [name for name in scorers.names() if scorers.get(name).evicts_in_decode])
def test_the_cache_stays_within_the_budget(tiny, read, name, monkeypatch):
    from graphkv import cache as module

    seen = []
    trim = module.RaggedCache.trim

    def spy(self):
        trim(self)
        seen.append([[group.start for group in groups] for groups in self.layers])

    monkeypatch.setattr(module.RaggedCache, "trim", spy)
    cell = tiny.compress(read, name, 48)
    tiny.decode(read, [cell], max_new_tokens=13, stop_ids=(), evict_every=4)
    assert seen == [[[tokens] for tokens in cell.kept_per_layer]] * 3


def test_what_cannot_evict_in_decode_is_refused(tiny, read):
    for settings, message in [
        (cell_settings("snapkv", 64), "defined for cake, h2o, rkv, tova, not for snapkv"),
        (cell_settings("h2o", 64, head_budget="ada"), "uniform only"),
        (cell_settings("h2o", 64, scorer_options={"causal": False}), "causal=true"),
    ]:
        with pytest.raises(UserError, match=message):
            tiny.decode(read, [tiny.cut(read, settings)], max_new_tokens=2, evict_every=1)
