"""Scores against loops in float64, on the real model's own keys and queries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import scores as naive

import scorers
from graphkv.config import CONF
from graphkv.selection import keep
from scorers import ALL_QUERIES, LayerView, Needs, Rope
from scorers import h2o as h2o_module
from scorers import rkv as rkv_module
from scorers.snapkv import pool, reduce_group

ALL = [
    "full",
    "knorm",
    "snapkv",
    "pyramidkv",
    "h2o",
    "cake",
    "streamingllm",
    "tova",
    "keydiff",
    "lagkv",
    "expected_attention",
    "rkv",
    "random",
    "oracle",
    "spankv",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors are small here: on busy cores a second thread is waited for much longer than it helps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rope_of(positions: int, d: int) -> Rope:
    """Rotary embeddings with base 10,000."""
    angle = torch.outer(torch.arange(positions), 10000 ** (-torch.arange(0, d, 2) / d)).repeat(1, 2)
    return Rope(angle.cos(), angle.sin())


def causal_mass(queries, keys, scaling) -> torch.Tensor:
    """What a prefill records for `Needs(mass=True)`; the loop is `naive.causal_mass`."""
    logits = queries.float() @ keys.float().repeat_interleave(len(queries) // len(keys), 0).mT * scaling
    return logits.masked_fill(torch.ones(logits.shape[1:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1).sum(1)


def view_of(keys, queries=None, values=None, answer=None, layer=0) -> LayerView:
    """A layer made of given tensors, with everything that a scorer may need; each query attends to its own key."""
    n, d = keys.shape[1:]
    queries = keys if queries is None else queries
    mass = causal_mass(queries, keys, d**-0.5) if queries.shape[1] == n else None
    values = keys if values is None else values
    return LayerView(keys, values, queries, d**-0.5, layer, 4, rope_of(n + 600, d), mass, answer)


def random_view(n: int, dtype=torch.float32, seed: int = 0, layer: int = 0, d: int = 16) -> LayerView:
    """Two KV heads with three query heads each, all queries and an answer of five tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, n, d), (6, n, d), (2, n, d), (6, 5, d)
    return view_of(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes), layer)


@pytest.fixture(scope="module")
def real_views(smol, essay) -> list[LayerView]:
    """The first 150 tokens of the essay on the real model, with the queries of the next 8 as those of the answer."""
    prompt = smol.prefill(smol.tokenizer(essay)["input_ids"][:158], window=158)
    cos, sin = smol.model.model.rotary_emb(torch.zeros(1), torch.arange(900)[None])
    views = []
    for view in prompt.layers:
        keys, values, queries = (x[:, :150] for x in (view.keys, view.values, view.queries))
        mass, answer = causal_mass(queries, keys, view.scaling), view.queries[:, 150:]
        recorded = {"rope": Rope(cos[0], sin[0]), "mass": mass, "answer_queries": answer}
        views.append(dataclasses.replace(view, keys=keys, values=values, queries=queries, **recorded))
    return views


def test_the_list_of_scorers_is_the_folder():
    assert scorers.names() == sorted(ALL)


@pytest.mark.parametrize("name", ALL)
def test_yaml_and_dataclass_have_the_same_fields_and_defaults(name):
    in_yaml = yaml.safe_load((CONF / "scorer" / f"{name}.yaml").read_text())
    assert in_yaml.pop("name") == name
    in_yaml = {key: tuple(value) if isinstance(value, list) else value for key, value in in_yaml.items()}
    assert in_yaml == dataclasses.asdict(scorers.get(name)())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", ["one past token", 33, 200])
def test_shape_dtype_and_range(name, dtype, n):
    scorer = scorers.get(name)()
    n = scorer.window + 1 if n == "one past token" else n
    view = random_view(n, dtype)
    score = scorer.score(view)
    assert score.shape == (2, n - scorer.window)
    assert score.dtype == torch.float32
    assert score.isfinite().all() and (score >= 0).all()
    assert torch.equal(score, scorer.score(random_view(n, dtype)))
    # Case S1: what a cache holds is exact in float32, so scores are those of the widened cache.
    wide = [x.float() for x in (view.keys, view.queries, view.values, view.answer_queries)]
    torch.testing.assert_close(score, scorer.score(view_of(*wide)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ALL)
def test_equal_tokens_never_cost_the_window_its_place(name):
    # Case S3: a sentinel score for the window would tie with the others'.
    scorer = scorers.get(name)(window=8)
    view = view_of(*(torch.ones(heads, n, 16) for heads, n in ((2, 64), (6, 64), (2, 64), (6, 5))))
    score = scorer.score(view)
    assert score.isfinite().all() and (score >= 0).all()
    kept = keep(score, 16, 64)
    assert kept.shape == (2, 16) and kept[:, 8:].tolist() == [list(range(56, 64))] * 2
    if name in ("full", "knorm", "tova", "keydiff", "oracle"):
        assert kept[:, :8].tolist() == [list(range(8))] * 2  # case S2: all equal, so the lower positions


@pytest.mark.parametrize("name", ALL)
def test_zero_keys_are_survived(name):
    keys = torch.zeros(2, 200, 16)
    keys[:, 50:80] = random_view(30).keys
    score = scorers.get(name)().score(view_of(keys, random_view(200).queries, answer=random_view(5).queries))
    assert score.isfinite().all() and (score >= 0).all()


REFERENCES = {
    "knorm": lambda v, s: naive.knorm(v.keys, s.window, s.positive),
    "h2o": lambda v, s: naive.h2o(v.queries, v.keys, v.scaling, s.window, s.causal, s.group),
    "cake": lambda v, s: naive.cake(v.queries, v.keys, v.scaling, s.window, s.kernel, s.gamma, s.pooling, s.group),
    "streamingllm": lambda v, s: naive.streamingllm(v.keys, s.window, s.sinks),
    "tova": lambda v, s: naive.tova(v.queries, v.keys, v.scaling, s.window),
    "keydiff": lambda v, s: naive.keydiff(v.keys, s.window),
    "lagkv": lambda v, s: naive.lagkv(v.keys, v.values, s.window, s.sinks, s.lag, s.value_weight, s.across),
    "expected_attention": lambda v, s: naive.expected_attention(
        v, s.window, s.sinks, s.n_future, s.covariance, s.value_norms, s.epsilon, s.group
    ),
    "oracle": lambda v, s: naive.oracle(v, s.window, s.group),
    "spankv": lambda v, s: naive.spankv(
        *(v.queries, v.keys, v.values, v.scaling, s.window, s.widths, s.weights, s.mix)
    ),
}
OPTIONS = [
    *(("knorm", {"positive": positive, "window": 3}) for positive in ("inverse", "max_minus", "softmax", "rank")),
    ("h2o", {}),
    ("h2o", {"causal": False}),
    ("h2o", {"causal": False, "window": 0, "group": "max"}),
    ("h2o", {"window": 5, "group": "sum"}),
    ("cake", {}),
    ("cake", {"window": 2, "kernel": 3, "gamma": 0.0, "pooling": "max", "group": "max"}),
    ("streamingllm", {}),
    ("streamingllm", {"window": 1, "sinks": 0}),
    ("tova", {}),
    ("tova", {"window": 1}),
    ("keydiff", {}),
    ("keydiff", {"window": 32}),
    ("lagkv", {}),
    ("lagkv", {"lag": 16}),
    ("lagkv", {"lag": 16, "sinks": 4, "value_weight": 0.5, "across": "score", "window": 20}),
    ("expected_attention", {}),
    ("expected_attention", {"window": 8, "sinks": 0, "n_future": 3, "epsilon": 0.01, "group": "max"}),
    ("expected_attention", {"covariance": False, "value_norms": False}),
    ("oracle", {}),
    ("oracle", {"window": 0, "group": "max"}),
    ("spankv", {}),
    ("spankv", {"widths": (1, 15, 63), "weights": (3.0, 2.0, 0.5), "window": 20}),
    ("spankv", {"widths": (31,)}),
    *(("spankv", {"widths": (1, 3, 7, 15, 31, 63), "mix": mix}) for mix in ("fixed", "head", "quota")),
    ("spankv", {"widths": (7, 1), "weights": (0.2, 0.1), "mix": "head"}),
    ("spankv", {"widths": (7, 1), "weights": (0.2, 0.1), "mix": "quota"}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@pytest.mark.parametrize("layer", ["random", 5, 17])
def test_scores_equal_the_loop(real_views, name, options, layer):
    view = random_view(90, seed=1) if layer == "random" else real_views[layer]
    scorer = scorers.get(name)(**options)
    expected = REFERENCES[name](view, scorer)
    np.testing.assert_allclose(scorer.score(view).numpy(), expected, rtol=2e-4, atol=1e-6 * max(1, expected.max()))


RKV_OPTIONS = [
    {},
    {"window": 16, "kernel": 5, "pooling": "avg", "group": "mean", "weight": 0.5, "threshold": 0.8},
    {"window": 1, "pooling": "none", "weight": 0.0, "spare_last": False},
]


@pytest.mark.parametrize("options", RKV_OPTIONS)
@pytest.mark.parametrize("layer", ["random", 5, 17])
def test_rkv_is_the_published_score_raised_by_a_constant(real_views, options, layer):
    view = random_view(90, seed=1) if layer == "random" else real_views[layer]
    scorer = scorers.get("rkv")(**options)
    s = scorer
    published = naive.rkv(
        *(view.queries, view.keys, view.scaling, s.window, s.kernel),
        *(s.weight, s.threshold, s.pooling, s.group, s.spare_last),
    )
    score = scorer.score(view).numpy()
    assert (score >= 0).all() and (published < 0).any()
    np.testing.assert_allclose(
        score - score.max(1, keepdims=True), published - published.max(1, keepdims=True), rtol=1e-3, atol=2e-8
    )


@pytest.mark.parametrize("pooling", ["avg", "max", "none"])
@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_snapkv_equals_the_loop_on_the_real_model(smol_prompt, pooling, group):
    view = smol_prompt.layers[11]
    scorer = scorers.get("snapkv")(window=24, kernel=5, pooling=pooling, group=group)
    expected = naive.snapkv(view.queries, view.keys, view.scaling, 24, 5, pooling, group)
    np.testing.assert_allclose(scorer.score(view).numpy(), expected, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("layer", [0, 29])
def test_snapkv_defaults_equal_the_loop_on_the_real_model(smol_prompt, layer):
    view = smol_prompt.layers[layer]
    expected = naive.snapkv(view.queries, view.keys, view.scaling, 32, 7, "avg", "mean")
    np.testing.assert_allclose(scorers.get("snapkv")().score(view).numpy(), expected, rtol=2e-4, atol=1e-7)
    assert torch.equal(scorers.get("pyramidkv")().score(view), scorers.get("snapkv")().score(view))


@pytest.mark.parametrize("window", [0, 32])
def test_knorm_equals_the_loop_on_the_real_model(smol_prompt, window):
    view = smol_prompt.layers[7]
    scorer = scorers.get("knorm")(window=window)
    np.testing.assert_allclose(scorer.score(view).numpy(), naive.knorm(view.keys, window), rtol=1e-5)


def test_knorm_scores_are_float32_whatever_the_cache_is():
    # Case S1: norms in bfloat16 would leave about 55 distinct scores of 512.
    keys = torch.randn(1, 512, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    knorm = scorers.get("knorm")()
    score = knorm.score(view_of(keys))
    assert torch.equal(score, knorm.score(view_of(keys.float())))
    assert len(score.unique()) > 500


def test_knorm_prefers_small_norms_and_survives_a_zero_key():
    keys = torch.tensor([[[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [6.0, 8.0]]])
    score = scorers.get("knorm")().score(view_of(keys))[0]
    assert score.argsort(descending=True).tolist() == [2, 1, 0, 3]
    assert score.isfinite().all()


def test_pooling_counts_the_padding_and_keeps_the_length():
    # Case S13.
    row = torch.tensor([[0.0, 0, 6, 0, 0, 0, 0]])
    assert pool(row, 3, "avg").tolist() == [[0, 2, 2, 2, 0, 0, 0]]
    assert pool(row, 3, "max").tolist() == [[0, 6, 6, 6, 0, 0, 0]]
    assert pool(row, 3, "none").tolist() == row.tolist()
    assert pool(torch.tensor([[6.0, 0, 0]]), 3, "avg").tolist() == [[2, 2, 0]]


def test_group_reduction_decides_which_token_stays():
    # Case S15: mean and sum prefer token 1, max prefers token 0.
    scores = torch.tensor([[[1.0, 0], [0, 0.9], [0, 0.9], [0, 0]]])
    assert torch.allclose(reduce_group(scores, "mean"), torch.tensor([[0.25, 0.45]]))
    assert torch.allclose(reduce_group(scores, "sum"), torch.tensor([[1.0, 1.8]]))
    assert torch.allclose(reduce_group(scores, "max"), torch.tensor([[1.0, 0.9]]))


@pytest.mark.parametrize("name", ALL)
def test_pooling_is_the_last_step(name):
    scorer, view = scorers.get(name)(), random_view(90, seed=2)
    assert torch.equal(scorer.finish(scorer.raw_score(view)), scorer.score(view))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 6), (4, 1)])
def test_one_row_a_stored_head(name, heads, kv_heads):
    # Case S14: 32 query heads over 8 KV heads give 8 rows; 32 where keys are stored for each query head.
    generator = torch.Generator().manual_seed(3)
    shapes = (kv_heads, 70, 8), (heads, 70, 8), (kv_heads, 70, 8), (heads, 4, 8)
    view = view_of(*(torch.randn(shape, generator=generator) for shape in shapes))
    scorer = scorers.get(name)()
    assert scorer.score(view).shape == (kv_heads, 70 - scorer.window)
    assert scorer.score(view.per_query_head()).shape == (heads, 70 - scorer.window)


def test_what_scorers_need():
    needs = {name: scorers.get(name)().needs for name in ALL}
    assert {name for name in ALL if needs[name] == Needs()} == {
        *("full", "knorm", "keydiff", "lagkv", "random", "streamingllm")
    }
    assert needs["snapkv"] == needs["pyramidkv"] == needs["cake"] == needs["spankv"] == Needs(queries=32)
    assert (needs["rkv"], needs["tova"]) == (Needs(queries=8), Needs(queries=1))
    assert (needs["h2o"], needs["oracle"]) == (Needs(mass=True), Needs(answer=True))
    assert needs["expected_attention"] == scorers.get("h2o")(causal=False).needs == Needs(queries=ALL_QUERIES)


@pytest.mark.parametrize("name", ["knorm", "keydiff"])
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.floats(0.01, 100))
def test_keys_alone_know_no_order_and_no_scale(name, seed, scale):
    view = random_view(40, seed=seed)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    scorer = scorers.get(name)()
    score = scorer.score(view)
    torch.testing.assert_close(scorer.score(view_of(view.keys[:, order])), score[:, order], rtol=1e-4, atol=1e-6)
    factor = 1 / scale if name == "knorm" else 1
    torch.testing.assert_close(scorer.score(view_of(view.keys * scale)), score * factor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("positive", ["inverse", "max_minus", "softmax", "rank"])
def test_maps_of_the_norm_rank_alike(positive):
    score = scorers.get("knorm")(positive=positive).score(random_view(60))
    assert torch.equal(score.argsort(dim=-1, descending=True), random_view(60).keys.norm(dim=-1).argsort(dim=-1))


def test_rank_of_equal_norms_prefers_the_lower_position():
    keys = torch.tensor([[[2.0], [1.0], [2.0], [1.0]]])
    score = scorers.get("knorm")(positive="rank").score(view_of(keys, torch.ones(1, 1, 1)))
    assert score.tolist() == [[0.5, 1, 0.25, 0.75]]


def test_causal_mass_of_equal_keys_is_the_harmonic_sum():
    # Token j is one of i + 1 equal keys for each query i ≥ j; without a mask every query gives each key 1 / n.
    view = view_of(torch.ones(1, 50, 4))
    harmonic = [sum(1 / (i + 1) for i in range(j, 50)) for j in range(40)]
    torch.testing.assert_close(scorers.get("h2o")(window=10).score(view), torch.tensor([harmonic]))
    free = scorers.get("h2o")(window=0, causal=False).score(view)
    torch.testing.assert_close(free, torch.ones(1, 50))


def test_the_baselines_mask_hides_the_future_of_the_window_only():
    keys = torch.zeros(1, 6, 4)
    score = scorers.get("h2o")(window=3, causal=False).score(view_of(keys))
    # Queries 0 to 3 hit these three past keys with 1/6 each (3 with 1/4), 4 with 1/5 and 5 with 1/6.
    torch.testing.assert_close(score, torch.full((1, 3), 3 / 6 + 1 / 4 + 1 / 5 + 1 / 6))


@pytest.mark.parametrize("window", [0, 7])
def test_blocks_of_rows_give_the_same_mass(monkeypatch, window):
    view = random_view(61, seed=4)
    whole = h2o_module.column_mass(view.queries, view.keys, view.scaling, window)
    torch.testing.assert_close(whole.sum(-1), torch.full((6,), 61.0))
    monkeypatch.setattr(h2o_module, "_BLOCK_ELEMENTS", 6 * 61 * 5)
    torch.testing.assert_close(h2o_module.column_mass(view.queries, view.keys, view.scaling, window), whole)


def test_cake_prefers_bursts_over_steady_attention():
    # Two queries: token 0 gets 0.3 and 0.3, token 1 gets 0.6 and 0, the last token of the past the rest.
    rows = torch.tensor([[0.3, 0.6, 0.1], [0.3, 1e-12, 0.7]])

    class Fixed(LayerView):
        def window_attention(self, window):
            return torch.cat([rows, torch.zeros(2, 2)], -1)[None]

    view = random_view(5)
    view = Fixed(view.keys[:1], view.values[:1], view.queries[:1], 1.0, 0, 1)
    options = {"window": 2, "kernel": 1}
    steady = scorers.get("cake")(gamma=0.0, **options).score(view)
    torch.testing.assert_close(steady, torch.tensor([[0.3, 0.3, 0.4]]))
    score = scorers.get("cake")(**options).score(view)
    torch.testing.assert_close(score, torch.tensor([[0.3, 0.3 + 200 * 0.18, 0.4 + 200 * 0.18]]))
    entropy = -sum(p * np.log(p) for p in (0.3, 0.6, 0.1, 0.3, 0.7))
    assert scorers.get("cake")(**options).preference(view) == pytest.approx(entropy * 0.36, rel=1e-5)
    other = scorers.get("cake")(tau1=1.6, tau2=0.4, **options).preference(view)
    assert other == pytest.approx(entropy ** (1 / 1.6) * 0.36**2.5, rel=1e-5)


@pytest.mark.parametrize("taus", [(1.0, 1.0), (1.6, 0.4)])
def test_cake_preference_equals_the_loop_on_the_real_model(real_views, taus):
    scorer = scorers.get("cake")(tau1=taus[0], tau2=taus[1])
    for view in (real_views[0], real_views[17], random_view(60)):
        expected = naive.cake_preference(view.queries, view.keys, view.scaling, 32, *taus)
        assert scorer.preference(view) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("budget", "expected"), [(9, [0, 1, 2, 3, 15, 16, 17, 18, 19]), (4, [0, 1, 2, 3]), (2, [0, 1])]
)
@pytest.mark.parametrize("window", [0, 1])
def test_streamingllm_keeps_sinks_and_the_most_recent(budget, expected, window):
    score = scorers.get("streamingllm")(window=window).score(random_view(20))
    if window < budget - 4 or window == 0:
        assert keep(score, budget, 20).tolist() == [expected] * 2


def test_tova_may_drop_the_newest_token_unless_told_otherwise():
    keys, queries = torch.zeros(1, 5, 2), torch.zeros(1, 5, 2)
    keys[0, 4], queries[0, 4] = torch.tensor([-9.0, 0]), torch.tensor([9.0, 0])  # its own key repels the last query
    view = view_of(keys, queries)
    assert keep(scorers.get("tova")().score(view), 3, 5).tolist() == [[0, 1, 2]]
    assert keep(scorers.get("tova")(window=1).score(view), 3, 5).tolist() == [[0, 1, 4]]


def test_keydiff_prefers_the_odd_key_out():
    keys = torch.tensor([[[1.0, 0], [2.0, 0], [0, 3.0], [1.0, 0]]])
    score = scorers.get("keydiff")().score(view_of(keys))[0]
    assert score.argmax() == 2
    anchor = np.array([3, 1]) / np.sqrt(10)
    np.testing.assert_allclose(score.numpy(), [1 - anchor[0], 1 - anchor[0], 1 - anchor[1], 1 - anchor[0]], rtol=1e-5)


def test_lagkv_keeps_the_same_share_of_every_block():
    view = random_view(4 + 5 * 20 + 7, seed=5)
    scorer = scorers.get("lagkv")(sinks=4, lag=20)
    kept = keep(scorer.score(view), 4 + 27 + 4 * 6, view.n)
    for positions in kept.tolist():
        assert positions[:4] == [0, 1, 2, 3] and positions[-27:] == list(range(84, 111))
        blocks = [(position - 4) // 20 for position in positions[4:-27]]
        assert [blocks.count(block) for block in range(4)] == [6] * 4


@pytest.mark.parametrize(("n", "budget"), [(30, 10), (43, 12), (3, 2)])
def test_lagkv_of_a_short_prompt_is_sinks_and_recency(n, budget):
    view = random_view(n)
    streaming = scorers.get("streamingllm")(sinks=4).score(view)
    assert torch.equal(keep(scorers.get("lagkv")(sinks=4, lag=20).score(view), budget, n), keep(streaming, budget, n))


def test_lagkv_does_not_depend_on_the_scale_of_a_channel():
    view = random_view(100, seed=6)
    generator = torch.Generator().manual_seed(0)
    scale, shift = torch.rand(16, generator=generator) + 0.5, torch.randn(16, generator=generator)
    moved = view_of(view.keys * scale + shift, view.queries, view.values * scale - shift)
    scorer = scorers.get("lagkv")(lag=20, across="score")
    torch.testing.assert_close(scorer.score(moved), scorer.score(view), rtol=1e-4, atol=1e-5)


def test_expected_attention_is_exact_where_the_future_is_certain():
    # All tokens ask the same question before rotation, and only the next position counts: no variance, no average.
    n, d = 30, 16
    view = random_view(n, seed=7)
    rope, question = view.rope, torch.randn(6, 1, d, generator=torch.Generator().manual_seed(1))
    queries = rope.rotate(question.expand(-1, n, -1), torch.arange(n))
    view = view_of(view.keys, queries, view.values)
    scorer = scorers.get("expected_attention")(sinks=0, n_future=1, value_norms=False)
    asked = rope.rotate(question, torch.tensor([n])).view(2, 3, d)
    expected = (asked @ view.keys.mT * view.scaling).softmax(-1).mean(1)
    torch.testing.assert_close(scorer.score(view), expected, rtol=1e-3, atol=1e-6)


def test_expected_attention_ends_where_positions_end():
    view = random_view(30, seed=8)
    short = dataclasses.replace(view, rope=Rope(view.rope.cos[:35], view.rope.sin[:35]))
    five, many = (scorers.get("expected_attention")(n_future=n_future) for n_future in (5, 512))
    torch.testing.assert_close(many.score(short), five.score(view))
    assert not torch.allclose(many.score(view), five.score(view))
    with pytest.raises(ValueError, match="rotary"):
        many.score(dataclasses.replace(view, rope=None))


def test_rkv_spares_the_latest_of_near_copies():
    # Tokens 1, 3 and 5 share a direction: 5 is the latest copy for 1 and 3, and 3 the latest for 5.
    keys = torch.eye(8)[None, :, :8].clone()
    keys[0, 3] = keys[0, 5] = keys[0, 1]
    scorer = scorers.get("rkv")(window=1, weight=0.0)
    score = scorer.score(view_of(keys, torch.zeros(1, 8, 8)))[0]
    # Column sums of C: token 1 keeps two copies, token 3 one, token 5 none, like all others.
    published = torch.tensor([0, 2, 0, 1, 0, 0, 0, 0.0]) / 8
    redundancy = published.softmax(-1)[:7]
    torch.testing.assert_close(score, redundancy.max() - redundancy)
    assert score[5] > score[3] > score[1] == 0


def test_blocks_of_columns_give_the_same_redundancy(monkeypatch):
    view, scorer = random_view(67, seed=9), scorers.get("rkv")(threshold=0.3)
    whole = scorer.score(view)
    for columns in (1, 10, 66):
        monkeypatch.setattr(rkv_module, "_BLOCK_COLUMNS", columns)
        torch.testing.assert_close(scorer.score(view), whole, rtol=1e-4, atol=1e-7)


def test_random_scores_are_the_same_everywhere_but_differ_by_seed_layer_and_head():
    scorer = scorers.get("random")(window=0)
    score = scorer.score(random_view(300))
    assert torch.equal(scorer.score(random_view(300, torch.bfloat16, seed=5)), score)
    assert torch.equal(scorers.get("random")().score(random_view(300)), score[:, :268])
    others = [
        scorer.score(random_view(300, layer=1)),
        scorers.get("random")(window=0, seed=1).score(random_view(300)),
        score.flip(0),
    ]
    assert all((other != score).float().mean() > 0.99 for other in others)
    assert score.mean() == pytest.approx(0.5, abs=0.05) and score.min() >= 0 and score.max() < 1


def test_oracle_ranks_by_what_the_answer_asks():
    keys = torch.zeros(1, 6, 2)
    keys[0, 2], keys[0, 4] = torch.tensor([4.0, 0]), torch.tensor([0, 4.0])
    view = view_of(keys, answer=torch.tensor([[[9.0, 0], [0, 9.0], [9.0, 0]]]))
    score = scorers.get("oracle")(window=0).score(view)[0]
    torch.testing.assert_close(score.sum(), torch.tensor(1.0))
    assert score.argsort(descending=True)[:2].tolist() == [2, 4]
    assert score[2] == pytest.approx(2 / 3, abs=1e-4)


def test_oracle_of_an_answer_that_asked_nothing_is_zero():
    view = view_of(torch.ones(1, 40, 2), answer=torch.ones(2, 0, 2))
    assert torch.equal(scorers.get("oracle")().score(view), torch.zeros(1, 8))


def test_spankv_without_pooling_is_snapkv_weighed_by_values(real_views):
    for view in (random_view(120, seed=10), real_views[9]):
        raw = scorers.get("snapkv")(pooling="none").score(view)
        score = scorers.get("spankv")(widths=(1,)).score(view)
        torch.testing.assert_close(score, raw / 32 * view.values[:, :-32].norm(dim=-1), rtol=1e-5, atol=0)
        units = dataclasses.replace(view, values=torch.nn.functional.normalize(view.values, dim=-1))
        kept = keep(scorers.get("spankv")(widths=(1,)).score(units), 48, view.n)
        assert torch.equal(kept, keep(raw, 48, view.n))


@pytest.mark.parametrize("mix", ["fixed", "head", "quota"])
def test_only_the_ratios_of_spankvs_weights_matter(real_views, mix):
    kept = [
        keep(scorers.get("spankv")(weights=weights, mix=mix).score(real_views[9]), 64, 150)
        for weights in ((), (0.5, 0.5), (1.0, 1.0), (40.0, 40.0), (1.0, 3.0))
    ]
    assert all(torch.equal(kept[0], other) for other in kept[1:4])
    assert not torch.equal(kept[0], kept[4])


def test_spankv_keeps_the_span_whole():
    # A span of 15 tokens of which every other one is attended to, against lone tokens that get a fifth of that.
    u = torch.full((1, 300), 1e-3)
    u[:, 100:115:2] = 1
    u[:, 200:300:10] = 0.2
    span = set(range(100, 115))
    best = {
        widths: set(scorers.get("spankv")(widths=widths).finish(u).topk(15).indices[0].tolist())
        for widths in ((1,), (1, 15))
    }
    assert best[1, 15] == span
    assert len(best[1,] & span) <= 8


def test_pooling_in_spankv_counts_the_padding():
    u = torch.tensor([[6.0, 0, 0, 0, 0]])
    assert scorers.get("spankv")(widths=(3,)).finish(u).tolist() == [[2, 2, 0, 0, 0]]
    assert scorers.get("spankv")(widths=(1, 3), weights=(1.0, 2.0)).finish(u)[0, 0].item() == pytest.approx(10 / 3)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(-20, 20), st.sampled_from(["fixed", "head"]))
def test_spankvs_mixtures_know_no_scale(seed, power, mix):
    u = torch.rand(3, 90, generator=torch.Generator().manual_seed(seed)) ** 4
    scorer = scorers.get("spankv")(widths=(1, 3, 15), mix=mix)
    torch.testing.assert_close(scorer.finish(u * 2.0**power), scorer.finish(u) * 2.0**power, rtol=1e-5, atol=0)


def test_a_head_pools_as_far_as_its_mass_lies_in_spans():
    # Head 0 has lone tokens only, head 1 the same mass in one span: the first is left as it is.
    u = torch.zeros(2, 200)
    u[0, 10:200:20] = 1
    u[1, 50:60] = 1
    scorer = scorers.get("spankv")(widths=(1, 3, 9), mix="head")
    lone, span = scorer.finish(u)
    torch.testing.assert_close(lone, u[0])
    assert span[49] > 0 and span[54] > span[50]
    # What the graph's additive reading made negative does not spoil the roots.
    assert scorer.finish(u - 0.1).isfinite().all()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([(), (1.0, 3.0, 4.0)]))
def test_every_scale_has_its_quota_of_any_budget(seed, budget, weights):
    u = torch.rand(2, 60, generator=torch.Generator().manual_seed(seed)).mul(8).floor()  # with ties
    widths = (1, 5, 21)
    scorer = scorers.get("spankv")(widths=widths, weights=weights, mix="quota")
    kept = keep(scorer.finish(u), budget, 60)
    for place, width in enumerate(widths):
        share = weights[place] / 8 if weights else 1 / 3
        own = keep(pool(u, width, "avg"), int(share * budget + 1e-9), 60)
        for head in range(2):
            assert set(own[head].tolist()) <= set(kept[head].tolist())


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("snapkv", {"window": 0}, "window"),
        ("snapkv", {"kernel": 4}, "kernel"),
        ("snapkv", {"pooling": "mean"}, "pooling"),
        ("snapkv", {"group": "min"}, "group"),
        ("knorm", {"window": -1}, "window"),
        ("pyramidkv", {"beta": 0}, "beta"),
        ("pyramidkv", {"schedule": "even"}, "schedule"),
        ("knorm", {"positive": "log"}, "positive"),
        ("h2o", {"group": "min"}, "group"),
        ("cake", {"window": 1}, "window"),
        ("cake", {"gamma": -1.0}, "gamma"),
        ("cake", {"tau2": 0.0}, "tau"),
        ("streamingllm", {"sinks": -1}, "sinks"),
        ("lagkv", {"lag": 0}, "lag"),
        ("lagkv", {"value_weight": -1.0}, "value_weight"),
        ("lagkv", {"across": "block"}, "across"),
        ("expected_attention", {"n_future": 0}, "n_future"),
        ("expected_attention", {"epsilon": -0.1}, "epsilon"),
        ("expected_attention", {"group": "min"}, "group"),
        ("rkv", {"window": 0}, "window"),
        ("rkv", {"weight": 1.5}, "weight"),
        ("rkv", {"threshold": -0.5}, "threshold"),
        ("random", {"seed": -1}, "seed"),
        ("oracle", {"group": "min"}, "group"),
        ("spankv", {"window": 0}, "window"),
        ("spankv", {"widths": ()}, "widths must be odd"),
        ("spankv", {"widths": (1, 30)}, "widths must be odd"),
        ("spankv", {"widths": (-1,)}, "widths must be odd"),
        ("spankv", {"widths": (1, 15, 63), "weights": (0.5, 0.5)}, "3 widths, 2 weights"),
        ("spankv", {"weights": (1.0, 0.0)}, "weights must be positive"),
        ("spankv", {"weights": (1.0, float("nan"))}, "weights must be positive"),
        ("spankv", {"mix": "auto"}, "mix must be fixed, head or quota"),
    ],
)
def test_impossible_options_are_refused(name, options, part):
    with pytest.raises(ValueError, match=part):
        scorers.get(name)(**options)


def test_unknown_scorer_lists_the_known_ones():
    with pytest.raises(ValueError, match="snapkw.*cake, expected_attention, full, h2o, .*, spankv, streamingllm, tova"):
        scorers.get("snapkw")
