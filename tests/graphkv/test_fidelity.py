"""Fidelity: exact for a cell that keeps everything, equal to naive float64 sums elsewhere, stored like any task."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch.nn import functional

from eval.errors import UserError
from eval.samples import Encoded, Sample
from graphkv import fidelity, grid
from graphkv.config import CONF, DecodeConfig, cell_settings, parse
from graphkv.measures import Context


class Task:
    """What the measure asks of a task."""

    output_error = True

    def text(self, ids):
        return str(list(ids))


def context(engine, prompt, **encoded) -> Context:
    """A sample of 12 tokens to come."""
    sample = Sample("s", "t", "", ("",), 12)
    config, encoding = SimpleNamespace(decode=DecodeConfig()), Encoded(prompt.ids, prompt.n, **encoded)
    return Context(engine, config, Task(), sample, encoding, prompt)


def composed(*overrides: str):
    """A typed configuration of a small fidelity run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        base = ["model=tiny", "task=fidelity", "budget=80", "task.fresh.tokens=200", "task.max_new_tokens=6"]
        return parse(compose("config", overrides=[*base, *overrides]))


CELLS = [
    ("full", 1.0, {}),
    ("pyramidkv", 100, {}),
    ("snapkv", 90, {"graphkv": {}}),
    ("knorm", 60, {"granularity": "query_head"}),
    ("snapkv", 90, {"head_budget": "ada"}),
    ("snapkv", 70, {"bias": "mass", "fold": True}),
]


@pytest.fixture(scope="module")
def measured(smol, smol_prompt):
    """Cells of the real model with their parts of records, and the memo."""
    cells = [smol.cut(smol_prompt, cell_settings(name, budget, **options)) for name, budget, options in CELLS]
    found = context(smol, smol_prompt)
    return cells, fidelity.fidelity(found, cells), found


def test_the_full_cache_is_itself(measured):
    _, parts, _ = measured
    scores = parts[0]["scores"]
    assert scores["kl"] < 1e-5 and max(parts[0]["kl_per_token"]) < 1e-5
    assert scores["agreement"] == 1 and scores["first_disagreement"] == len(parts[0]["ids"])
    assert scores["kept_mass"] == pytest.approx(1, abs=1e-6) and scores["output_error"] < 1e-5
    assert all(part["scores"]["kl"] > 1e-4 for part in parts[1:])


def test_divergence_is_that_of_single_steps_in_float64(measured, smol, smol_prompt):
    cells, parts, found = measured
    ids = parts[0]["ids"]
    for cell, part in zip(cells, parts, strict=True):
        # The cell writes the continuation by itself: every other token is made impossible.
        logits = [
            logit
            for logit in fidelity.decode.teacher_forced(
                smol.model, smol_prompt, [cell.kept], ids, [cell.correction], chunk=1
            )
        ]
        own = torch.cat(logits, 1)[0].double().log_softmax(-1)
        full = found.memo["reference"].log_probs.double()
        expected = (full.exp() * (full - own)).sum(-1)
        assert part["kl_per_token"] == pytest.approx(expected.tolist(), abs=2e-5)
        same = (own.argmax(-1) == full.argmax(-1)).tolist()
        assert part["scores"]["agreement"] == pytest.approx(sum(same) / len(same))
        assert part["scores"]["first_disagreement"] == ([*same, False].index(False))


def test_logits_in_pieces_change_nothing(measured, smol, smol_prompt, monkeypatch):
    cells, parts, _ = measured
    monkeypatch.setattr(fidelity, "_LOGITS", 3 * len(cells) * 49_152)
    again = fidelity.fidelity(context(smol, smol_prompt), cells)
    for part, other in zip(parts, again, strict=True):
        assert part["scores"] == pytest.approx(other["scores"], abs=1e-5)


def test_kept_mass_cosine_and_output_error_equal_naive_loops(measured, smol_prompt):
    cells, parts, found = measured
    queries = found.memo["reference"].queries
    for cell, part in zip(cells[1:], parts[1:], strict=True):
        masses, cosines, errors = [], [], []
        for layer, view in list(enumerate(smol_prompt.layers))[::7]:
            heads, stored = queries[layer].shape[0], len(cell.kept[layer])
            per_layer = []
            for head in range(stored):
                kept = cell.kept[layer][head].tolist()
                group = head * view.keys.shape[0] // stored
                keys, values = view.keys[group].double(), view.values[group].double()
                shares = []
                for query_head in range(head * heads // stored, (head + 1) * heads // stored):
                    for query in queries[layer][query_head].double():
                        p = (keys @ query * view.scaling).softmax(0)
                        shares.append(p)
                        weights, held = p[kept], values[kept]
                        if cell.correction is not None:
                            weights = weights * cell.correction.bias[layer][head].double().exp()
                            held = cell.correction.values[layer][head].double()
                        whole, rest = p @ values, weights / weights.sum() @ held
                        per_layer.append(((whole - rest).norm() / whole.norm()).item())
                mean = torch.stack(shares).mean(0)
                masses.append(mean[kept].sum().item())
                unit = functional.normalize(keys[kept], dim=-1)
                cosines.append(((unit @ unit.T).sum() - len(kept)).item() / (len(kept) * (len(kept) - 1)))
            errors.append(sum(per_layer) / len(per_layer))
        every = slice(None, None, 7)
        assert part["output_error_per_layer"][every] == pytest.approx(errors, abs=1e-4)
        layers = [type(cell)(cell.settings, cell.kept[every], 0, 0.0)]
        reference = found.memo["reference"].mass[every]
        assert fidelity.kept_mass(layers[0], reference) == pytest.approx(sum(masses) / len(masses), abs=1e-5)
        view = type(smol_prompt)(smol_prompt.ids, smol_prompt.layers[every], smol_prompt.logits, 0.0)
        assert fidelity.key_cosine(layers[0], view) == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)


def test_a_given_continuation_is_read_as_it_is(tiny, tiny_prompt):
    given = (7, 8, 9, 10)
    cells = [tiny.cut(tiny_prompt, cell_settings("full", 1.0)), tiny.cut(tiny_prompt, cell_settings("snapkv", 64))]
    parts = fidelity.fidelity(context(tiny, tiny_prompt, continuation=given), cells)
    assert parts[1]["ids"] == list(given) and len(parts[1]["kl_per_token"]) == 4
    assert parts[0]["scores"]["kl"] < 1e-5 < parts[1]["scores"]["kl"]


def test_a_run_shares_prefills_and_resumes(tmp_path, capsys, monkeypatch):
    read = []
    original = grid.Engine.prefill
    monkeypatch.setattr(grid.Engine, "prefill", lambda *args, **kwargs: read.append(1) or original(*args, **kwargs))
    overrides = [f"results_dir={tmp_path}", "limit=2", "task.fresh.kinds=[word,code]"]
    configs = [composed(*overrides, *more) for more in ([], ["+graphkv=on"], ["scorer=full"])]
    assert grid.run(configs) == 0
    assert len(read) == 4  # two kinds with two prompts each, three cells
    shown = capsys.readouterr().out
    assert "KL [95 %]" in shown
    files = sorted(tmp_path.rglob("records.jsonl"))
    assert len(files) == 6
    record = json.loads(files[0].read_text().splitlines()[0])
    assert record["status"] == "ok" and {"kl", "agreement", "kept_mass"} <= record["scores"].keys()
    assert grid.run(configs) == 0
    assert len(read) == 4 and "0 samples to do" in capsys.readouterr().err
    assert {path.suffix for path in (tmp_path / "tables").iterdir()} == {".md", ".csv", ".png", ".pdf"}


def test_eviction_while_decoding_has_no_fidelity():
    with pytest.raises(UserError, match=r"decode.evict_every.*fidelity"):
        grid.run([composed("scorer=h2o", "decode.evict_every=4", "task.fresh.kinds=[prose]")])
