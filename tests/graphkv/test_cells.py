"""Every scorer × graph × granularity × head budgets × dtype × prompt length, through the whole engine."""

from __future__ import annotations

import functools

import pytest
import torch

import graphkv
import scorers
from graphkv import budgets
from graphkv.cache import RaggedCache
from graphkv.config import cell_settings
from graphkv.decode import teacher_force
from scorers import ALL_QUERIES, Needs

BUDGET = 48
EVERYTHING = Needs(queries=ALL_QUERIES, mass=True)
LENGTHS = [1, 31, 32, 33, BUDGET, BUDGET + 1, 300]


@functools.cache
def engine(dtype: str) -> graphkv.Engine:
    """The tiny model in a dtype."""
    return graphkv.Engine.from_pretrained("tiny", dtype=dtype)


@functools.cache
def prompt(dtype: str, n: int) -> graphkv.Prefill:
    """`n` tokens that repeat themselves now and then, with everything recorded that a scorer may ask for."""
    ids = [(7 * i + i // 5) % 250 for i in range(n)]
    return engine(dtype).look_ahead(engine(dtype).prefill(ids, needs=EVERYTHING), 4, stop_ids=())


@pytest.mark.parametrize("name", scorers.names())
@pytest.mark.parametrize("graph", [None, {"neighbors": 3}], ids=["plain", "graph"])
@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("head_budget", ["uniform", "ada"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_cell(name, graph, granularity, head_budget, dtype):
    for n in LENGTHS:
        read = prompt(dtype, n)
        settings = cell_settings(name, BUDGET, graph, None, granularity, head_budget)
        scorer = settings.scorer
        cell = engine(dtype).cut(read, settings)
        heads = 4 if settings.granularity == "query_head" else 2
        expected = budgets.per_layer(scorer, BUDGET, n, read.layers)
        for layer, (kept, tokens) in enumerate(zip(cell.kept, expected, strict=True)):
            assert len(kept) == heads
            assert sum(cell.kept_per_head[layer]) == heads * tokens
            if settings.head_budget == "uniform":
                assert cell.kept_per_head[layer] == [tokens] * heads
            for head in kept:
                assert (head.diff() > 0).all() and head.min() >= 0 and head.max() < n
                window = min(scorer.window, n)
                assert head[len(head) - window :].tolist() == list(range(n - window, n))
        assert cell.bytes == sum(map(sum, cell.kept_per_head)) * 2 * 16 * read.layers[0].keys.element_size()
        again = engine(dtype).cut(read, settings)
        for one, other in zip(cell.kept, again.kept, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        (answer,) = engine(dtype).decode(read, [cell], max_new_tokens=3, stop_ids=())
        assert answer.ids[0] == int(read.logits.argmax())
        if n <= BUDGET:
            full = engine(dtype).compress(read, "full")
            (whole,) = engine(dtype).decode(read, [full], max_new_tokens=3, stop_ids=())
            assert dtype == "bfloat16" or answer.ids == whole.ids


@pytest.mark.parametrize("graph", [None, {"neighbors": 3}])
def test_rows_of_different_kind_share_a_batch(graph):
    # KV-head rows, query-head rows, ragged heads and the full cache, each as if it were alone.
    read, ids = prompt("float32", 300), [5, 90, 17]
    cells = [
        engine("float32").cut(read, cell_settings(name, budget, graph, None, granularity, heads))
        for name, budget, granularity, heads in [
            ("full", 1.0, "kv_head", "uniform"),
            ("snapkv", 64, "query_head", "uniform"),
            ("snapkv", 100, "kv_head", "ada"),
            ("pyramidkv", 64, "query_head", "ada"),
            ("h2o", 40, "kv_head", "uniform"),
        ]
    ]
    model = engine("float32").model
    together = teacher_force(model, read, [cell.kept for cell in cells], ids)
    for row, cell in enumerate(cells):
        alone = teacher_force(model, read, [cell.kept], ids)[0]
        torch.testing.assert_close(together[row], alone, rtol=1e-4, atol=1e-4)
    batch = engine("float32").decode(read, cells, max_new_tokens=12, stop_ids={3})
    solo = engine("float32").decode(read, cells, max_new_tokens=12, stop_ids={3}, mode="solo")
    assert [answer.ids for answer in batch] == [answer.ids for answer in solo]


def test_query_heads_that_keep_the_same_as_their_kv_head_answer_the_same():
    read = prompt("float32", 300)
    by_kv = engine("float32").compress(read, "knorm", 100)
    by_query = engine("float32").cut(read, cell_settings("knorm", 100, granularity="query_head"))
    for kv, query in zip(by_kv.kept, by_query.kept, strict=True):
        assert torch.equal(kv.repeat_interleave(2, 0), query)
    assert by_query.bytes == 2 * by_kv.bytes
    logits = [teacher_force(engine("float32").model, read, [cell.kept], [1, 2, 3]) for cell in (by_kv, by_query)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_head_budgets_store_what_they_say():
    read = prompt("float32", 300)
    cell = engine("float32").cut(read, cell_settings("snapkv", 80, head_budget="ada", head_floor=0.1))
    assert len({length for heads in cell.kept_per_head for length in heads}) > 1
    cache = RaggedCache(read, [cell.kept], capacity=0)
    stored = 0
    for groups in cache.layers:
        for group in groups:
            visible = group.keys.shape[0] * group.keys.shape[1] if group.visible is None else int(group.visible.sum())
            stored += visible * 16 * 4 * 2
    assert stored == cell.bytes


def test_sinks_and_skipped_layers():
    # Case B11: KVCache-Factory's KNorm leaves layers 0 and 1 alone and protects nothing.
    read = prompt("float32", 300)
    options = {"sinks": 4, "skip_layers": (1,)}
    cell = engine("float32").compress(read, "knorm", 40, scorer_options=options)
    assert cell.kept_per_layer == [40, 300]
    assert (cell.kept[0][:, :4] == torch.arange(4)).all()
    plain = engine("float32").compress(read, "knorm", 40)
    assert not (plain.kept[0][:, :4] == torch.arange(4)).all()


def test_recorded_mass_is_the_causal_column_sum():
    read = prompt("float32", 300)
    for view in read.layers:
        keys = view.keys.double().repeat_interleave(2, 0)
        logits = view.queries.double() @ keys.transpose(-1, -2) * view.scaling
        logits.masked_fill_(torch.ones(300, 300, dtype=torch.bool).triu(1), float("-inf"))
        torch.testing.assert_close(view.mass.double(), logits.softmax(-1).sum(1), rtol=1e-4, atol=1e-5)
    chunked = engine("float32").prefill(read.ids, needs=EVERYTHING, chunk=70)
    for view, other in zip(read.layers, chunked.layers, strict=True):
        torch.testing.assert_close(view.mass, other.mass, rtol=1e-3, atol=1e-4)


def test_recorded_rope_undoes_the_models_rotation():
    read, model = prompt("float32", 300), engine("float32").model
    view, positions = read.layers[0], torch.arange(300)
    with torch.inference_mode():
        hidden = model.model.embed_tokens(torch.tensor([read.ids]))
        layer = model.model.layers[0]
        keys = layer.self_attn.k_proj(layer.input_layernorm(hidden)).view(300, 2, 16).transpose(0, 1)
    torch.testing.assert_close(view.rope.unrotate(view.keys, positions), keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(view.rope.rotate(keys, positions), view.keys, rtol=1e-4, atol=1e-4)


def test_the_answers_queries_are_those_of_the_full_caches_answer():
    read, tiny = prompt("float32", 300), engine("float32")
    (answer,) = tiny.decode(read, [tiny.compress(read, "full")], max_new_tokens=4, stop_ids=())
    longer = tiny.prefill([*read.ids, *answer.ids[:-1]], needs=EVERYTHING)
    for view, whole in zip(read.layers, longer.layers, strict=True):
        torch.testing.assert_close(view.answer_queries, whole.queries[:, 300:], rtol=1e-3, atol=1e-4)
