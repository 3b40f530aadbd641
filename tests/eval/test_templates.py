"""Prompts equal LongBench's to the last byte, whatever the package that holds the templates does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval import templates
from eval.errors import UserError
from eval.metrics import LONGBENCH, LONGBENCH_E

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("GRAPHKV_SHARED", ROOT.parent / "shared")) / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no LongBench rows in {SHARED}")

# sha256 of the prompt that the official template makes of the first real row of each task in ../shared.
FILLED = {
    "narrativeqa": "04e3c190dc139bf5fe9b868fb76bbd10c483e8d901e4d310aa73cf8052b03d30",
    "qasper": "31f2c87c9fc99a29cee73ab66694c80bc0d96f20bb6d989594cffe712efcf061",
    "multifieldqa_en": "a680b8711325e470c1fbe6359644ba3f516c657bbb90f2cb5cab7a140a9626cd",
    "hotpotqa": "c78acff58e10a962b6adcaf41e2e039570cd2f20ad22d53325b546fd0107db3d",
    "2wikimqa": "4af72bb5e42e6d359c0be1dc4ee58a8333b8d06777ad4f10fc24f327c03d166d",
    "musique": "efed6159e81dd546a3f1590d2c062d6f8f1d723cc60ff9789bf22471bfa74c9f",
    "gov_report": "96a08f3deab97dbfbebd5c0e28279b85a9d27aa97ec6e430e1e6901bfe3cdec9",
    "qmsum": "d9ed7189bcd6e48f960b7953c3691ca134c99527dfc84246e8874bec679223c3",
    "multi_news": "719783884098a04fa30dfa05645dfa7b4520c552cfb6dce4e4651254b37cc132",
    "trec": "e81de5becd4df2526b4ab379406e025ab60c56d7ea926ad35584219add738364",
    "triviaqa": "04fffe279e5ed5765aeb5491ea15e61c3cef3ea31e36856d4a424f70a9d13713",
    "samsum": "85c19384988fc4982ebcd09e5de1e3a0ed81a15946a181660c41720d5b86d468",
    "passage_count": "56a1c77ee9f76d6873c8c1359d8025fb94ef194c6dacc4f2209a450ec1bfc2f0",
    "passage_retrieval_en": "bce83b38dd6675df4a9bb6893e593f6be7be75b7ca1d94b67b9d463c31c710b8",
    "lcc": "5aad25287172390f279ee433acea644d5b4e02e3fa05bf9f0669b5eee51c27f7",
    "repobench-p": "8cff4feb4eeaaf1891e862d3fb65a050bfac59658fd2466e5cffa716a26a6bff",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder that stands for lm_eval's: `write` puts a template there."""
    monkeypatch.setattr(templates, "_folder", lambda: tmp_path)
    templates.template.cache_clear()
    yield lambda name, text: (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    templates.template.cache_clear()


@pytest.mark.parametrize("task", LONGBENCH)
def test_is_the_official_template(task):
    text = templates.template(task)
    assert hashlib.sha256(text.encode()).hexdigest() == templates.SHA256[task]


@needs_shared
def test_equals_the_official_files():
    folder = SHARED / "longbench_config"
    prompts = json.loads((folder / "dataset2prompt.json").read_text(encoding="utf-8"))
    lengths = json.loads((folder / "dataset2maxlen.json").read_text(encoding="utf-8"))
    for task in LONGBENCH:
        assert templates.template(task) == prompts[task]
        assert templates.MAX_NEW_TOKENS[task] == lengths[task]


@needs_shared
@pytest.mark.parametrize("task", LONGBENCH)
def test_filled_prompt_of_a_real_row(task):
    with (SHARED / "longbench" / f"{task}.jsonl").open(encoding="utf-8") as lines:
        prompt = templates.fill(task, json.loads(next(lines)))
    assert hashlib.sha256(prompt.encode()).hexdigest() == FILLED[task]


@pytest.mark.parametrize("task", LONGBENCH)
def test_no_escaped_newlines(task):
    """Case P8: single quotes in YAML once turned newlines into a backslash and an n."""
    assert "\\n" not in templates.template(task) and "\n" in templates.template(task)


@pytest.mark.parametrize("task", LONGBENCH)
def test_context_and_question_are_the_only_gaps(task):
    text = templates.template(task).replace("{context}", "", 1).replace("{input}", "", 1)
    assert "{" not in text and "}" not in text


@pytest.mark.parametrize(
    ("task", "end"),
    [
        ("triviaqa", "{context}\n\n{input}"),
        ("samsum", "{context}\n\n{input}"),
        ("trec", "{context}\n{input}"),
        ("passage_count", "The final answer is: "),
        ("passage_retrieval_en", "The answer is: "),
        ("lcc", "{context}Next line of code:\n"),
        ("repobench-p", "{context}{input}Next line of code:\n"),
    ],
)
def test_white_space_at_the_end(task, end):
    assert templates.template(task).endswith(end)


def test_braces_in_the_data_stay():
    row = {"context": "def f(): return {'a': {0}}", "input": "{context}"}
    assert templates.fill("trec", row).endswith("def f(): return {'a': {0}}\n{context}")


@pytest.mark.parametrize("task", LONGBENCH_E)
def test_e_tasks_share_the_prompt(task):
    assert templates.template(task) == templates.template(task.removesuffix("_e"))


@pytest.mark.parametrize("task", ["hotpot", "musique_e", "hotpotqa_e_e", "", "lsht"])
def test_unknown_task(task):
    with pytest.raises(UserError, match="unknown LongBench task.*hotpotqa"):
        templates.template(task)


def test_another_template_is_refused(package):
    package("trec", 'doc_to_text: "Which type? {{context}}\\n{{question}}"')
    with pytest.raises(UserError, match="trec.*is not LongBench's.*lm_eval==0.4.13"):
        templates.template("trec")


@pytest.mark.parametrize("text", ["a: [", "- a list", "task: trec", ""])
def test_broken_template_file(package, text):
    package("trec", text)
    with pytest.raises(UserError, match="no LongBench template in .*trec.yaml.*lm_eval==0.4.13"):
        templates.template("trec")


def test_functions_in_the_yaml_are_not_run(package):
    package("trec", 'process_results: !function os.abort\ndoc_to_text: "x"')
    with pytest.raises(UserError, match="is not LongBench's"):
        templates.template("trec")


def test_missing_file(package):
    with pytest.raises(UserError, match="no LongBench template in .*install lm_eval==0.4.13"):
        templates.template("trec")


def test_missing_package(monkeypatch):
    monkeypatch.setattr(templates.importlib.util, "find_spec", lambda name: None)
    templates.template.cache_clear()
    with pytest.raises(UserError, match="install lm_eval==0.4.13"):
        templates.template("trec")


def test_the_package_is_not_imported():
    code = "import sys; import eval.templates as t; t.template('trec'); print('lm_eval' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
