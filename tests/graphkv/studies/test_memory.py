"""Table 5: the formula against known sizes and against the tensors of real cells."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from graphkv.config import cell_settings
from graphkv.studies.memory import PAPER_MODELS, Shape, measure, shape_of, stored_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("model", "tokens", "mib"),
    [
        ("Llama-3-8B-Instruct", 7_500, 937.5),
        ("Mistral-7B-Instruct-v0.2", 31_500, 3_937.5),
        ("Llama-2-7B-Chat", 3_500, 1_750),
    ],
)
def test_known_sizes(model, tokens, mib):
    assert PAPER_MODELS[model].bytes(tokens) == mib * MIB
    group = PAPER_MODELS[model].query_heads // PAPER_MODELS[model].kv_heads
    assert PAPER_MODELS[model].bytes(tokens, "query_head") == group * mib * MIB


def test_a_layer_of_llama3_at_512_tokens():
    # Case S14: one copy a KV head, 2 · 8 · 512 · 128 · 2 bytes.
    assert Shape(1, 32, 8, 128, 2).bytes(512) == 2_097_152


def test_formula_cell_and_tensors_agree(tiny, tiny_prompt):
    assert shape_of(tiny_prompt) == Shape(2, 4, 2, 16, 4)
    cells = [cell_settings("full", 1.0)]
    cells += [
        cell_settings("snapkv", budget, None, None, kind) for budget in (64, 400) for kind in ("kv_head", "query_head")
    ]
    frame = measure(tiny, tiny_prompt, cells)
    assert (frame["formula_bytes"] == frame["cell_bytes"]).all() and (
        frame["cell_bytes"] == frame["stored_bytes"]
    ).all()
    token = 2 * 2 * 2 * 16 * 4  # key and value, layers, KV heads, head size, bytes
    assert frame["stored_bytes"].tolist() == [300 * token, 64 * token, 128 * token, 300 * token, 600 * token]
    assert frame["budget"].isna().tolist() == [True, False, False, False, False]
    counted = tiny_prompt.layers[0].keys.nbytes + tiny_prompt.layers[0].values.nbytes
    assert frame["stored_bytes"][0] == len(tiny_prompt.layers) * counted


def test_ragged_heads_are_stored_with_padding(tiny, tiny_prompt):
    cell = tiny.cut(tiny_prompt, cell_settings("snapkv", 80, head_budget="ada"))
    assert cell.bytes == sum(map(sum, cell.kept_per_head)) * 2 * 16 * 4
    assert cell.bytes < stored_bytes(tiny_prompt, cell) < 2 * cell.bytes


def test_the_command_on_two_lengths(run, tmp_path):
    done = run(
        "experiment=table5", "study.lengths=[300,600]", "study.budgets=[64,400]", "scorer=knorm", results=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = done.files
    assert list(found) == [".md", ".csv", "-paper-models.csv", ".json"]
    frame = pd.read_csv(found[".csv"])
    assert len(frame) == 2 * 5 and frame["length"].tolist() == [300] * 5 + [600] * 5
    token = 2 * 2 * 2 * 16 * 4
    for row in frame.itertuples():
        tokens = row.length if pd.isna(row.budget) else min(row.budget, row.length)
        heads = 2 if row.granularity == "query_head" else 1
        assert row.formula_bytes == row.cell_bytes == row.stored_bytes == heads * tokens * token
    page = found[".md"].read_text()
    assert "| knorm-64@query\\_head |" in page and "4 query heads, 2 KV heads (2 query heads share one)" in page
    assert "neither layers nor KV heads" in page and "Llama-3-8B-Instruct, KV heads" in page
    assert json.loads(found[".json"].read_text())["shape"]["kv_heads"] == 2


def test_settings_name_the_files(run, tmp_path):
    command = ["experiment=table5", "study.lengths=[300]", "study.budgets=[64]"]
    first = run(*command, results=tmp_path).files
    assert run(*command, results=tmp_path).files == first
    for other in ("study.budgets=[65]", "scorer=h2o", "study.question=Who?"):
        changed = run(*command[:2], *(command[2:] if "budgets" not in other else []), other, results=tmp_path).files
        assert not set(changed.values()) & set(first.values())


def test_a_budget_of_layers_of_its_own_is_shown_beside_the_formula(run, tmp_path):
    sizes = ["study.lengths=[1000]", "study.budgets=[128]"]
    done = run("experiment=table5", *sizes, "scorer=pyramidkv", "head_budget=ada", results=tmp_path)
    assert done.returncode == 0, done.stderr
    frame = pd.read_csv(done.files[".csv"])
    padded = frame[frame["stored_bytes"] > frame["cell_bytes"]]
    assert len(padded) == 2 and "(formula " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scorer=full"], "name another scorer than full"),
        (["study.budgets=[16]"], "study.budgets: budget=16 is below the window of 32 tokens"),
        (["study.budgets=[]"], "budgets must be different positive numbers, not []"),
        (["study.lengths=[300,300]"], "lengths must be different positive numbers, not [300, 300]"),
        (["study.lengths=[5000]"], "a prompt of 5000 tokens and an answer of 1 exceed the 4096 positions"),
    ],
)
def test_mistakes_write_nothing(run, tmp_path, arguments, message):
    done = run("experiment=table5", *arguments, results=tmp_path / "results")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "results").exists()
