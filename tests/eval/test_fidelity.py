"""The fidelity task: where its prompts come from, what its records depend on, and the table of divergences."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import bootstrap

from eval import fidelity, fidelity_table, fresh, mini, needle
from eval.cell_results import CellResult, ModelResults
from eval.errors import UserError
from graphkv.config import CONF, cell_settings
from graphkv.models import byte_tokenizer

PROSE = needle.read_haystack()
LONGBENCH = {"name": "longbench", "data": "mini", "tasks": ["trec"], "hub": {}}
PROTOCOL = yaml.safe_load((CONF / "protocol/official.yaml").read_text(encoding="utf-8"))


def words(text: str, n: int) -> str:
    """A cut that needs no tokenizer: the first `n` words."""
    return " ".join(text.split(" ")[:n])


def built(limit: int | None = None, **config) -> fidelity.FidelityTask:
    """The task on the byte tokenizer."""
    options = {"family": None, "max_positions": 4096, "stop_ids": (), "limit": limit, "partial": False}
    return fidelity.build({"name": "fidelity", **config}, byte_tokenizer(), PROTOCOL, **options)


@pytest.mark.parametrize("kind", fresh.KINDS)
def test_a_fresh_prompt_is_the_same_each_time_and_another_for_each_number_and_seed(kind):
    made = [fresh.make(kind, number, seed, PROSE, words, 200) for seed in (0, 1) for number in range(6)]
    assert made[0] == fresh.make(kind, 0, 0, PROSE, words, 200)
    assert len({prompt.context for prompt in made}) == len(made)
    for prompt in made:
        assert prompt.question
        assert prompt.context.count(prompt.fact) == 1 if prompt.fact else not prompt.answer
        assert prompt.answer in prompt.fact


@pytest.mark.parametrize("kind", fresh.FACTS)
def test_a_fact_stands_after_a_whole_sentence_and_is_in_no_haystack(kind):
    for number in range(10):
        prompt = fresh.make(kind, number, 3, PROSE, words, 300)
        before, after = prompt.context.split(prompt.fact)
        assert re.search(r"[.!?][\"'”’)]* $", before) and re.match(r"\s+[A-Z]|$", after)
        assert prompt.fact not in PROSE


def test_facts_have_the_length_that_their_kind_says():
    sizes = {kind: len(fresh.make(kind, 0, 0, PROSE, words, 200).fact.split()) for kind in fresh.FACTS}
    assert sizes["word"] < 10 and sizes["number"] < 12 and 20 < sizes["sentence"] < 35 < sizes["passage"] < 80
    assert re.search(r"\b\d{7}\.", fresh.make("number", 0, 0, PROSE, words, 200).fact)


def test_code_is_the_standard_librarys():
    prompt = fresh.make("code", 2, 0, PROSE, words, 120)
    assert prompt.context.startswith(("def ", "class ")) and not prompt.fact


def test_samples_of_all_sources_are_encoded_by_their_source():
    task = built(
        limit=1,
        prompts=["fresh", "needle", "mini"],
        max_new_tokens=7,
        fresh={"kinds": ["word"], "tokens": 300},
        needle={"lengths": [600]},
        mini={"tasks": ["trec"], "per_task": 2},
        longbench=LONGBENCH,
    )
    assert [sample.task for sample in task.samples] == ["fresh-word", "needle", "mini-trec"]
    assert set(task.identity) == {"fresh-word", "needle", "mini-trec"}
    for sample in task.samples:
        assert sample.max_new_tokens == 7 and len(task.encode(sample).ids) > 100
    assert len(task.encode(task.samples[1]).ids) == 600


def test_longbench_rows_are_the_first_that_are_short_enough(tmp_path):
    rows = [dict(row) for row in mini.rows("qasper")[:4]]
    rows[0]["context"] *= 9
    (tmp_path / "qasper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    here = {**LONGBENCH, "data": str(tmp_path), "tasks": ["qasper"]}
    every = built(prompts=["longbench"], longbench={**here, "max_tokens": 10**6})
    sizes = [every.encode(sample).n_raw for sample in every.samples]
    assert len(sizes) == 4 and sizes[0] > max(sizes[1:])
    some = built(prompts=["longbench"], longbench={**here, "per_task": 2, "max_tokens": max(sizes[1:])})
    assert [sample.id for sample in some.samples] == [sample.id for sample in every.samples[1:3]]
    assert {sample.task for sample in some.samples} == set(some.identity) == {"longbench-qasper"}
    limited = built(limit=3, prompts=["longbench"], longbench=here)  # a limit accepts files that lack rows
    assert [sample.id for sample in limited.samples] == [sample.id for sample in every.samples[:3]]
    with pytest.raises(UserError, match="qasper has no prompt of at most 9 tokens"):
        built(prompts=["longbench"], longbench={**here, "max_tokens": 9})
    for wrong in (0, "two", True):
        with pytest.raises(UserError, match="per_task must be a whole number of at least 1"):
            built(prompts=["longbench"], longbench={**here, "per_task": wrong})
    with pytest.raises(UserError, match="prompts=.mini."):
        built(prompts=["longbench"], longbench=LONGBENCH)


def test_the_key_of_a_record_knows_seed_length_and_texts_but_not_how_many():
    base = built(prompts=["fresh"], fresh={"kinds": ["word"], "per_kind": 2, "tokens": 300}).identity
    assert built(limit=1, prompts=["fresh"], fresh={"kinds": ["word"], "per_kind": 9, "tokens": 300}).identity == base
    for change in ({"seed": 1}, {"tokens": 301}):
        assert (
            built(prompts=["fresh"], fresh={"kinds": ["word"], "per_kind": 2, "tokens": 300, **change}).identity != base
        )
    assert built(prompts=["fresh"], max_new_tokens=9, fresh={"kinds": ["word"], "tokens": 300}).identity != base


def test_a_text_goes_on_or_is_asked_about(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 40, encoding="utf-8")
    folder = {"folder": str(tmp_path), "tokens": 50}
    given = built(prompts=["texts"], max_new_tokens=8, texts={**folder, "given": True})
    encoded = given.encode(given.samples[0])
    assert len(encoded.ids) == 50 and len(encoded.continuation) == 8
    ids = byte_tokenizer()("abcdefghij" * 40)["input_ids"]
    assert list(encoded.ids + encoded.continuation) == ids[:58]
    asked = built(prompts=["texts"], texts={**folder, "question": "Which letters?"})
    assert "Which letters?" in asked.text(asked.encode(asked.samples[0]).ids)
    assert asked.encode(asked.samples[0]).continuation is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"prompts": ["web"]}, "prompts are fresh"),
        ({"prompts": []}, "prompts is empty"),
        ({"max_new_tokens": 1}, "max_new_tokens must be 2"),
        ({"promts": ["fresh"]}, "unknown field promts"),
        ({"fresh": {"kind": ["word"]}}, "fresh has no kind"),
        ({"fresh": {"kinds": ["poem"]}}, "'poem'"),
        ({"prompts": ["texts"]}, "texts.folder is None"),
        ({"prompts": ["texts"], "texts": {"folder": "/", "given": True, "question": "?"}}, "no texts.question"),
    ],
)
def test_mistakes_get_a_sentence(config, message):
    with pytest.raises(UserError, match=message):
        built(**config)


def results(divergence: dict[str, list[float]], kinds: list[str]) -> ModelResults:
    """A model's results with the given divergences by cell."""
    cells = {
        "full": cell_settings("full", 1.0),
        "snapkv": cell_settings("snapkv", 128),
        "snapkv+graph": cell_settings("snapkv", 128, {}),
        "h2o": cell_settings("h2o", 128),
        "snapkv 64": cell_settings("snapkv", 64),
    }
    samples = [(f"s{i}", kind) for i, kind in enumerate(kinds)]
    return ModelResults(
        "m",
        {"dtype": "float32", "data": "fresh", "data_hash": "0" * 64},
        samples,
        [
            CellResult(
                name,
                cells[name].describe(),
                {
                    f"s{i}": {"status": "ok", "scores": {"kl": value, "agreement": 0.5}, "kept": [128.0, 128.0]}
                    for i, value in enumerate(values)
                    if value is not None
                },
            )
            for name, values in divergence.items()
        ],
    )


KINDS = ["a", "a", "b", "b", "b", "b", "b", "b"]
RNG = np.random.default_rng(5)
BASE = RNG.random(8)
DIVERGENCE = {
    "h2o": list(BASE + 0.3),
    "snapkv+graph": list(BASE + RNG.normal(0, 0.01, 8)),
    "snapkv": list(BASE),
    "full": [0.0] * 8,
    "snapkv 64": list(BASE + 1),
}


def test_the_table_compares_each_cell_with_its_own_base():
    rows = {row.name: row for row in fidelity_table.build(results(DIVERGENCE, KINDS))}
    assert set(rows) == {
        "Full",
        "SnapKV (budget 128)",
        "SnapKV (budget 64)",
        "SnapKV (budget 128)+GraphKV",
        "H2O (budget 128)",
    }
    plain, graph, h2o = rows["SnapKV (budget 128)"], rows["SnapKV (budget 128)+GraphKV"], rows["H2O (budget 128)"]
    assert plain.kl.difference == pytest.approx(BASE.mean())
    low, high = bootstrap((BASE,), np.mean, method="percentile", n_resamples=10_000, rng=0).confidence_interval
    assert (plain.kl.low, plain.kl.high) == pytest.approx((low, high), abs=0.02)
    assert plain.by_kind == pytest.approx({"a": BASE[:2].mean(), "b": BASE[2:].mean()})
    assert plain.to_base is None and plain.to_plain is None and rows["Full"].to_base is None
    assert h2o.to_base.difference.difference == pytest.approx(0.3) and h2o.to_base.mark == "**"
    assert graph.to_base.difference.difference == graph.to_plain.difference.difference
    # One comparison, though it stands in both columns: two in all, with that of H2O.
    assert graph.to_base is graph.to_plain and h2o.to_base.p_holm == pytest.approx(2 * h2o.to_base.sign.p)
    assert "over the 2 comparisons" in fidelity_table.caption_of(results(DIVERGENCE, KINDS), list(rows.values()))
    assert rows["SnapKV (budget 64)"].to_base is None  # no other scorer at that budget


def test_differences_by_kind_are_those_of_its_prompts():
    rows = fidelity_table.build(results(DIVERGENCE, KINDS))
    graph = next(row for row in rows if row.name == "SnapKV (budget 128)+GraphKV")
    h2o = next(row for row in rows if row.name == "H2O (budget 128)")
    assert h2o.to_plain_by_kind == {} and list(graph.to_plain_by_kind) == ["a", "b"]
    weights = {"a": 2 / len(BASE), "b": 1 - 2 / len(BASE)}
    whole = sum(weights[kind] * found.difference for kind, found in graph.to_plain_by_kind.items())
    assert whole == pytest.approx(graph.to_plain.difference.difference)
    of_kind = h2o.to_base_by_kind["a"]  # H2O is worse by the same on each prompt
    assert (of_kind.low, of_kind.high) == pytest.approx((0.3, 0.3))
    page = fidelity_table.as_markdown(rows, "caption")
    assert page.count("by kind of prompt**") == 2 and page.index("caption") < page.index("Δ of GraphKV by kind")
    frame = fidelity_table.as_frame(rows).set_index("cell")
    assert frame.loc["H2O (budget 128)", "to_base_b"] == pytest.approx(0.3)
    assert np.isnan(frame.loc["H2O (budget 128)", "to_plain_b"])


def test_a_missing_sample_leaves_no_mean():
    divergence = {**DIVERGENCE, "h2o": [None, *DIVERGENCE["h2o"][1:]]}
    row = next(row for row in fidelity_table.build(results(divergence, KINDS)) if row.name.startswith("H2O"))
    assert row.kl is None and row.to_base is None and (row.n, row.asked) == (7, 8)
    assert "— (7/8)" in fidelity_table.as_markdown([row], "")


def test_files_hold_the_numbers(tmp_path):
    rows, paths = fidelity_table.write(results(DIVERGENCE, KINDS), tmp_path / "t" / "fid")
    assert {path.suffix for path in paths} == {".md", ".csv", ".png", ".pdf"}
    table = pd.read_csv(tmp_path / "t" / "fid.csv").set_index("cell")
    assert table.loc["H2O (budget 128)", "kl"] == pytest.approx(np.mean(DIVERGENCE["h2o"]))
    assert table.loc["H2O (budget 128)", "to_base"] == pytest.approx(0.3)
    text = (tmp_path / "t" / "fid.md").read_text(encoding="utf-8")
    assert "2 a, 6 b" in text and "Holm" in text and "+0.300**" in text
    assert "+0.300**" in fidelity_table.brief(rows).to_string()


@pytest.mark.parametrize("names", [["snapkv", "snapkv 64", "full"], ["snapkv", "h2o", "full"]])
def test_the_figure_has_every_method_and_no_full_cache(names):
    rows = fidelity_table.build(results({name: DIVERGENCE[name] for name in names}, KINDS))
    figure = fidelity_table.figure(rows, "caption")
    (ax,) = figure.axes
    if "snapkv 64" in names:
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["SnapKV"]
        assert ax.get_xlabel() == "kept tokens a layer" and ax.get_yscale() == "log"
    else:
        assert {text.get_text() for text in ax.get_yticklabels()} == {"SnapKV", "H2O"}


def test_many_methods_get_a_panel_a_budget_and_a_line_each():
    rows = [row for row in fidelity_table.build(results(DIVERGENCE, KINDS)) if row.kl is not None]
    many = [replace(row, series=f"{row.series} {number}") for number in range(9) for row in rows]
    figure = fidelity_table.figure(many, "caption")
    panels = figure.axes
    assert [ax.get_title() for ax in panels] == ["64 tokens", "128 tokens"]
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    shown = [row for row in many if row.cell["scorer"]["name"] != "full"]
    assert sorted(names) == sorted({row.series for row in shown})
    for ax, budget in zip(panels, (64, 128), strict=True):
        points = {
            names[round(line.get_ydata()[0])]: line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 1
        }
        assert points == {row.series: row.kl.difference for row in shown if row.cell["budget"] == budget}
    assert names.index("H2O 0") < names.index("SnapKV 0")  # worse by 0.3 on each prompt, so below
