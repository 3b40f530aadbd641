"""Giving back the attention of evicted tokens: exact for duplicates, neutral where nothing was evicted."""

from __future__ import annotations

import math

import pytest
import torch

from eval.errors import UserError
from graphkv import decode
from graphkv.cache import RaggedCache
from graphkv.config import cell_settings
from graphkv.correction import CAP, Correction, correct
from scorers import LayerView


def layer_with_twins(n: int = 80, twin: int = 11, of: int = 5) -> LayerView:
    """A random layer whose token `twin` has key and value of token `of`."""
    torch.manual_seed(3)
    keys, values, queries = torch.randn(2, n, 8), torch.randn(2, n, 8), torch.randn(4, 32, 8)
    keys[:, twin], values[:, twin] = keys[:, of], values[:, of]
    return LayerView(keys, values, queries, 8**-0.5, 0, 1)


def without(n: int, *gone: int) -> torch.Tensor:
    """All positions but some."""
    return torch.tensor([position for position in range(n) if position not in gone])


def attend(query, keys, values, scaling, bias):
    """Attention of one query in float64."""
    logits = (keys.double() @ query.double()) * scaling + bias.double()
    return logits.softmax(-1) @ values.double()


@pytest.mark.parametrize("fold", [False, True])
def test_a_kept_twin_stands_for_its_evicted_duplicate(fold):
    view = layer_with_twins()
    kept = without(view.n, 11)
    found = correct([view], [[kept, kept]], "mass", fold)
    for head in range(2):
        bias = found.bias[0][head]
        values = found.values[0][head] if fold else view.values[head][kept]
        assert bias[5] == pytest.approx(math.log(2), abs=1e-6)
        assert bias.count_nonzero() == 1
        for query in torch.randn(5, 8):
            full = attend(query, view.keys[head], view.values[head], view.scaling, torch.zeros(view.n))
            mine = attend(query, view.keys[head][kept], values, view.scaling, bias)
            assert torch.allclose(full, mine, atol=1e-6)


def test_mass_goes_to_the_most_similar_kept_key_and_is_capped():
    view = layer_with_twins()
    kept = torch.tensor([0, 5, 20, 79])
    bias = correct([view], [[kept, kept]], "mass", False).bias[0][1]
    mass = view.window_attention(32).mean(1).unflatten(0, (2, 2)).mean(1)[1].double()
    keys = view.keys[1].double()
    given = dict.fromkeys(kept.tolist(), 0.0)
    for i in set(range(view.n)) - set(kept.tolist()):
        given[max(given, key=lambda j: torch.cosine_similarity(keys[i], keys[j], dim=0).item())] += mass[i].item()
    expected = [min(CAP, math.log1p(given[j] / mass[j].item())) for j in kept.tolist()]
    assert bias.tolist() == pytest.approx(expected, abs=1e-5)
    assert bias.max() <= CAP


def test_folded_values_are_means_by_mass():
    view = layer_with_twins(n=34)
    kept = torch.tensor([3, 33])
    found = correct([view], [[kept, kept]], "mass", True)
    mass = view.window_attention(32).mean(1).unflatten(0, (2, 2)).mean(1)[0]
    total = sum(mass[i] * view.values[0, i] for i in range(34))
    weights = torch.stack([mass[kept[0]], mass[kept[1]]]) * (found.bias[0][0].exp())
    if (found.bias[0][0] < CAP - 1e-6).all():  # else the bias does not tell the whole mass
        assert torch.allclose((weights[:, None] * found.values[0][0]).sum(0), total, atol=1e-5)
    assert torch.isfinite(found.values[0][0]).all()


def test_uniform_gives_the_lost_share_to_all():
    view = layer_with_twins()
    kept = without(view.n, *range(10))
    bias = correct([view], [[kept, kept]], "uniform", False).bias[0][0]
    mass = view.window_attention(32).mean(1).unflatten(0, (2, 2)).mean(1)[0]
    assert torch.allclose(bias, torch.full_like(bias, (1 / mass[kept].sum()).log().item()), atol=1e-5)


def test_nothing_evicted_means_no_bias(tiny, tiny_prompt):
    for kind in ("mass", "uniform"):
        everything = [list(torch.arange(tiny_prompt.n).expand(view.keys.shape[0], -1)) for view in tiny_prompt.layers]
        found = correct(tiny_prompt.layers, everything, kind, False)
        assert all(bias.abs().max() < 1e-5 for layer in found.bias for bias in layer)


@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("head_budget", ["uniform", "ada"])
@pytest.mark.parametrize("fold", [False, True])
def test_batch_and_solo_decode_alike_with_corrections(tiny, tiny_prompt, granularity, head_budget, fold):
    plain = tiny.cut(tiny_prompt, cell_settings("snapkv", 80, None, None, granularity, head_budget))
    options = (None, None, granularity, head_budget, 0.2, "mass", fold)
    corrected = tiny.cut(tiny_prompt, cell_settings("snapkv", 80, *options))
    other = tiny.cut(tiny_prompt, cell_settings("snapkv", 120, *options))
    assert corrected.keeps_same(corrected) and not corrected.keeps_same(plain)
    cells = [plain, corrected, other]
    batch = tiny.decode(tiny_prompt, cells, max_new_tokens=12, stop_ids=())
    solo = tiny.decode(tiny_prompt, cells, max_new_tokens=12, stop_ids=(), mode="solo")
    assert [a.ids for a in batch] == [a.ids for a in solo]
    forced = [
        decode.teacher_force(
            tiny.model,
            tiny_prompt,
            [cell.kept for cell in cells],
            batch[0].ids,
            [cell.correction for cell in cells],
            chunk=chunk,
        )
        for chunk in (None, 1, 5)
    ]
    assert torch.allclose(forced[0], forced[1], atol=1e-5) and torch.allclose(forced[0], forced[2], atol=1e-5)
    assert not torch.allclose(forced[0][0], forced[0][1], atol=1e-4)


def test_a_bias_acts_as_a_weight_on_the_key(tiny, tiny_prompt):
    # With log 2 on one token, attention is as if the token were there twice.
    kept = [torch.arange(tiny_prompt.n).expand(view.keys.shape[0], -1) for view in tiny_prompt.layers]
    bias = [[torch.zeros(tiny_prompt.n) for _ in layer] for layer in kept]
    twice = [[torch.cat([torch.arange(tiny_prompt.n), torch.tensor([7])]).sort().values] * len(layer) for layer in kept]
    for layer in bias:
        for head in layer:
            head[7] = math.log(2)
    ids = [5, 9, 1]
    weighted = decode.teacher_force(tiny.model, tiny_prompt, [kept], ids, [Correction(bias)])
    doubled = decode.teacher_force(tiny.model, tiny_prompt, [twice], ids)
    assert torch.allclose(weighted, doubled, atol=1e-5)


def test_rows_that_leave_take_their_bias_along(tiny, tiny_prompt):
    settings = [cell_settings("snapkv", budget, bias="mass") for budget in (70, 100, 90)]
    cells = [tiny.cut(tiny_prompt, each) for each in settings]
    cache = RaggedCache(tiny_prompt, [c.kept for c in cells], 4, corrections=[c.correction for c in cells])
    cache.keep_rows([0, 2])
    alone = RaggedCache(
        tiny_prompt, [cells[0].kept, cells[2].kept], 4, corrections=[cells[0].correction, cells[2].correction]
    )
    for mine, its in zip(cache.layers, alone.layers, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert torch.equal(a.bias[..., -80:], b.bias[..., -80:])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bias": "some"}, "bias must be"), ({"fold": True}, "fold needs bias=mass")],
)
def test_mistakes_get_a_sentence(options, message):
    with pytest.raises(UserError, match=message):
        cell_settings("snapkv", 64, **options)


def test_the_key_of_a_cell_without_bias_is_as_before():
    described = cell_settings("snapkv", 64).describe()
    assert "bias" not in described and "fold" not in described
    assert cell_settings("snapkv", 64, bias="mass").describe()["bias"] == "mass"
    assert cell_settings("snapkv", 64, bias="mass").label.endswith("+mass")
