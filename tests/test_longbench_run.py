"""LongBench through the runner: resume, keys, stops and tables on the tiny model; real rows on the real model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir

from eval import longbench, templates
from eval.metrics import LONGBENCH
from eval.records import RECORDS, read_records
from eval.samples import Sample
from graphkv import decode, grid
from graphkv.config import CONF, parse
from graphkv.engine import Engine
from graphkv.models import byte_tokenizer
from graphkv.work import Group

SHARED = Path(__file__).resolve().parents[2] / "shared"


def composed(*overrides: str):
    """A typed configuration of a LongBench run on mini rows."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        base = ["model=tiny", "task=longbench", "task.data=mini", "budget=64", "limit=2"]
        return parse(compose("config", overrides=[*base, *overrides]))


@pytest.fixture
def short_answers(monkeypatch):
    """Answers of 4 tokens, whatever the task: enough to run through."""
    monkeypatch.setattr(templates, "MAX_NEW_TOKENS", dict.fromkeys(templates.MAX_NEW_TOKENS, 4))


def records_below(folder: Path) -> dict[str, dict[str, dict]]:
    """Records by `<task>/<cell folder>`."""
    paths = sorted(folder.rglob(RECORDS))
    return {f"{path.parent.parent.name}/{path.parent.name}": read_records(path) for path in paths}


def test_tasks_have_folders_of_their_own_and_are_resumed(tmp_path, capsys, short_answers):
    cells = [("scorer=full",), ("scorer=snapkv",), ("scorer=snapkv", "+graphkv=on")]
    some = "task.tasks=[trec,hotpotqa]"
    run = [composed(some, *cell, f"results_dir={tmp_path}") for cell in cells]
    assert grid.run(run) == 0
    out = capsys.readouterr()
    assert "tiny mini-official: 4 samples × 3 cells, 4 samples to do" in out.err
    assert "mini: a test bed, NOT LongBench" in out.out
    first = records_below(tmp_path)
    assert {name.split("/")[0] for name in first} == {"trec", "hotpotqa"} and len(first) == 6
    for record in (record for records in first.values() for record in records.values()):
        assert record["meta"]["data"] == "mini" and record["status"] == "ok"
        assert {"n_prompt_raw", "n_prompt", "truncated", "notes", "references"} <= set(record)
        assert len(record["ids"]) <= 4 and 0 <= record["scores"]["score"] <= 1

    # Another list of tasks and another limit reuse what is there.
    more = [composed("task.tasks=[hotpotqa,lcc]", *cell, "limit=3", f"results_dir={tmp_path}") for cell in cells]
    assert grid.run(more) == 0
    assert "6 samples × 3 cells, 4 samples to do" in capsys.readouterr().err
    after = records_below(tmp_path)
    assert len(after) == 9
    for name, records in first.items():
        assert {sample: after[name][sample] for sample in records} == records

    (file,) = [path for path in (tmp_path / "tables").glob("*.csv") if "lcc" in path.read_text()]
    table = pd.read_csv(file)
    ours = table[(table.task == "hotpotqa") & (table.row == "SnapKV")].iloc[0]
    scores = [
        r["scores"]["score"] for n, rs in after.items() if n.startswith("hotpotqa/snapkv-64-") for r in rs.values()
    ]
    assert len(scores) == 3 and ours.ours == pytest.approx(100 * sum(scores) / 3, abs=0.005) and ours.n == 3


def test_protocols_never_share_a_record_or_a_table(tmp_path, capsys, short_answers):
    run = [
        composed("task.tasks=[samsum]", f"protocol={protocol}", f"results_dir={tmp_path}")
        for protocol in ("official", "paper")
    ]
    assert grid.run(run) == 0
    assert len(records_below(tmp_path)) == 2
    assert len(list((tmp_path / "tables").glob("*.md"))) == 2
    said = capsys.readouterr().out
    assert "Protocol official; edit similarity difflib" in said
    assert "Protocol paper; edit similarity levenshtein" in said


@pytest.mark.parametrize(
    ("protocol", "task", "says", "answer"),
    [
        ("official", "samsum", "a\nbc", "a\n"),  # newline ends the answer …
        ("official", "samsum", "\nabc", "abc"),  # … but may not be its first token
        ("official", "trec", "a\nbc", "a\nbc"),
        ("paper", "samsum", "a\nbc", "a\nbc"),  # the GraphKV script has no newline stop
    ],
)
def test_stops_of_a_model_that_says_given_tokens(tiny, monkeypatch, protocol, task, says, answer):
    # A stub in place of the model: at each step it prefers the next token of `says`; where that one is forbidden it
    # goes on with the one after it.
    ids = tiny.tokenizer(says, add_special_tokens=False)["input_ids"]
    encoded_by = Group.prepare([composed(f"task.tasks=[{task}]", f"protocol={protocol}")]).task
    encoded = encoded_by.encode(Sample("s", task, "Dialogue: …", ("x",), len(ids), {"all_classes": None}))
    said = 0

    def next_logits() -> torch.Tensor:
        row = torch.zeros(260)
        for place, token in enumerate(ids[said:]):
            row[token] = len(ids) - place
        return row

    def stub(model, tokens, start, state, last=1):
        nonlocal said
        said = ids.index(int(tokens[0, -1])) + 1
        row = next_logits()
        if said == len(ids):
            row[257] = 1.0  # </s>
        return row[None, None]

    monkeypatch.setattr(decode, "forward", stub)
    prompt = replace(tiny.prefill(encoded.ids), logits=next_logits())
    (generated,) = tiny.decode(
        prompt,
        [tiny.compress(prompt, "full")],
        max_new_tokens=len(ids) + 1,
        stop_ids=encoded.stop_ids,
        min_new_tokens=encoded.min_new_tokens,
    )
    assert encoded_by.text(generated.ids) == answer
    assert generated.finish == "stop"


@pytest.mark.skipif(not (SHARED / "data/longbench").is_dir(), reason=f"no LongBench rows below {SHARED}")
def test_real_rows_run_through_the_real_model(tmp_path, smol, capsys, short_answers, monkeypatch):
    """The shortest row of each task that has at most 3,000 tokens, under the official protocol."""
    monkeypatch.setitem(grid._engines, smol.info.config, smol)
    build = longbench.build

    def shortest(*arguments, **options):
        task = build(*arguments, **options)
        by_task = {}
        for sample in sorted(task.samples, key=lambda sample: -len(sample.prompt)):
            by_task[sample.task] = sample
        few = [s for s in by_task.values() if len(smol.tokenizer(s.prompt)["input_ids"]) <= 3000]
        return replace(task, samples=tuple(few))

    monkeypatch.setattr(longbench, "build", shortest)
    there = [task for task in LONGBENCH if (SHARED / "data/longbench" / f"{task}.jsonl").is_file()]
    config = composed(
        "model=smollm2",
        f"task.data={SHARED / 'data/longbench'}",
        f"task.tasks=[{','.join(there)}]",
        "+graphkv=on",
        "partial=true",
        "limit=null",
        f"results_dir={tmp_path}",
    )
    assert grid.run([config]) == 0
    done = [record for records in records_below(tmp_path).values() for record in records.values()]
    assert len(done) >= 8 and len({record["task"] for record in done}) == len(done)
    for record in done:
        assert record["kept"] == [min(64, record["n_prompt"])] * 30
        assert not record["truncated"] and record["n_prompt"] <= 3100
        assert json.dumps(record["scores"])


def test_the_tiny_model_has_a_token_a_byte():
    assert len(byte_tokenizer()("é\n", add_special_tokens=False)["input_ids"]) == 3
    assert Engine.from_pretrained("tiny").info.stop_ids == {257}
