"""Scoring while a prompt is read: the same kept tokens, and nothing stays that no cell needs."""

from __future__ import annotations

import pytest
import torch

import scorers
from eval.errors import UserError
from graphkv.config import cell_settings
from scorers import ALL_QUERIES, Needs

TEXT = " ".join(f"The barge of {word} came late and the bell of {word} rang." for word in "abcdefgh" * 3)
EVERYTHING = Needs(queries=ALL_QUERIES, mass=True)
NAMES = [name for name in scorers.names() if not scorers.get(name)().needs.answer]


def kept_of(engine, prompt, settings):
    return [[head.tolist() for head in layer] for layer in engine.cut(prompt, settings).kept]


@pytest.fixture(scope="module")
def recorded(tiny):
    return tiny.prefill(TEXT, needs=EVERYTHING)


@pytest.mark.parametrize("chunk", [None, 100])
def test_cells_keep_what_they_keep_of_a_prompt_with_all_records(tiny, recorded, chunk):
    wanted = [cell_settings(name, 64, graph) for name in NAMES for graph in (None, {"rounds": 1})]
    wanted += [cell_settings("h2o", 64, {"edge": "qq"}), cell_settings("h2o", 80, {"space": "before"})]
    wanted += [cell_settings("expected_attention", 64, granularity="query_head"), cell_settings("h2o", 64, bias="mass")]
    prompt = tiny.prefill(TEXT, window=0, chunk=chunk, cells=wanted)
    for settings in wanted:
        assert kept_of(tiny, prompt, settings) == kept_of(tiny, recorded, settings), settings


def test_records_that_only_scoring_needs_are_freed(tiny):
    cells = [cell_settings(name, 64) for name in ("expected_attention", "h2o", "snapkv")]
    prompt = tiny.prefill(TEXT, window=0, cells=cells)
    for view in prompt.layers:
        heads, w, d = view.queries.shape
        assert w == 32 and view.mass is None
        assert view.queries.untyped_storage().nbytes() == heads * w * d * view.queries.element_size()
    kept = tiny.prefill(TEXT, window=0, cells=[*cells, cell_settings("h2o", 64, {"edge": "qk", "rounds": 1})])
    assert all(view.queries.shape[1] == view.n and view.mass is None for view in kept.layers)
    before = tiny.prefill(TEXT, window=0, cells=[*cells, cell_settings("h2o", 64, {"space": "before"})])
    assert all(view.mass is not None for view in before.layers)


def test_what_fits_the_budget_is_not_scored(tiny):
    prompt = tiny.prefill(TEXT, window=0, cells=[cell_settings("h2o", 1.0), cell_settings("expected_attention", 99999)])
    assert not prompt.scoring.scores


def test_a_scorer_that_fails_fails_its_own_cells(tiny, monkeypatch):
    module = scorers.get("expected_attention")

    def broken(self, layer):
        if layer.layer == 1:
            raise RuntimeError("no such luck")
        return torch.ones(layer.keys.shape[0], layer.n - self.window)

    monkeypatch.setattr(module, "score", broken)
    bad, good = cell_settings("expected_attention", 64), cell_settings("h2o", 64)
    prompt = tiny.prefill(TEXT, window=0, cells=[bad, good])
    assert len(tiny.cut(prompt, good).kept) == len(prompt.layers)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such luck") as raised:
            tiny.cut(prompt, bad)
        # What is remembered holds no frames, whose tensors would stay as long as the prompt.
        (remembered,) = prompt.scoring.failures.values()
        assert remembered is not raised.value and remembered.__traceback__ is None


def test_scores_that_are_not_finite_are_refused(tiny, monkeypatch):
    scorer = scorers.get("h2o")
    monkeypatch.setattr(scorer, "score", lambda self, layer: torch.full((2, layer.n - self.window), float("nan")))
    settings = cell_settings("h2o", 64)
    for prompt in (tiny.prefill(TEXT, window=0, cells=[settings]), tiny.prefill(TEXT, needs=EVERYTHING)):
        with pytest.raises(ValueError, match="not finite"):
            tiny.cut(prompt, settings)


def test_the_time_of_scoring_is_selections_and_counted_once(tiny):
    first, second = cell_settings("expected_attention", 64), cell_settings("expected_attention", 96)
    prompt = tiny.prefill(TEXT, window=0, cells=[first, second])
    (spent,) = prompt.scoring.seconds.values()
    assert spent > 0
    assert tiny.cut(prompt, first).seconds > spent
    assert not prompt.scoring.seconds


def test_what_is_asked_for_beside_cells_stays(tiny):
    prompt = tiny.prefill(TEXT, cells=[cell_settings("h2o", 64)], window=8, needs=Needs(queries=40, mass=True))
    assert all(view.queries.shape[1] == 40 and view.mass is not None for view in prompt.layers)


def test_eviction_in_decode_needs_the_mass_that_was_freed(tiny):
    settings = cell_settings("h2o", 64)
    prompt = tiny.prefill(TEXT, cells=[settings])
    cell = tiny.cut(prompt, settings)
    with pytest.raises(UserError, match="h2o goes on from the attention mass"):
        tiny.decode(prompt, [cell], max_new_tokens=4, evict_every=2)
