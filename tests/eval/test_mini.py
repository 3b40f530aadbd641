"""Mini LongBench has LongBench's shape, and each question one right answer, to be found in the prompt."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from eval import longbench, mini, mini_code, mini_texts, templates
from eval.errors import UserError
from eval.metrics import LONGBENCH, score_row

ROOT = Path(__file__).resolve().parents[2]
CODE = ("lcc", "repobench-p")
QA = ("narrativeqa", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa")
SUMMARIES = ("gov_report", "qmsum", "multi_news", "samsum")


@pytest.mark.parametrize("task", LONGBENCH)
def test_rows_are_official(task):
    rows = mini.rows(task)
    assert len(rows) >= 20 and len({row["_id"] for row in rows}) == len(rows)
    assert len({templates.fill(task, row) for row in rows}) == len(rows)
    for row in rows:
        longbench.check_row(row, task, "here")
        assert row["length"] == len(f"{row['input']} {row['context']} {row['answers'][0]}".split())
        assert (row["all_classes"] is not None) == (task == "trec")
        assert row["language"] == ("python" if task in CODE else "en")


@pytest.mark.parametrize("task", LONGBENCH)
def test_prompts_are_short(task):
    """500 to 3,000 tokens of SmolLM2, which reads 3.3 (code) to 4.6 characters as one."""
    lengths = [len(templates.fill(task, row)) for row in mini.rows(task)]
    assert min(lengths) > 2_000 and max(lengths) < 11_500


@pytest.mark.parametrize("task", LONGBENCH)
def test_a_right_answer_scores_full_marks(task):
    for row in mini.rows(task):
        for similarity in ("difflib", "levenshtein"):
            scores = score_row(task, row["answers"][0], row["answers"], row["all_classes"], similarity)
            assert scores["score"] == pytest.approx(1, abs=1e-6)


def test_the_same_in_every_process():
    code = "from eval import mini; print(*(mini.data_hash(t) for t in ['hotpotqa', 'trec', 'repobench-p']))"
    run = [sys.executable, "-c", code]
    env = {"PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"}
    other = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert other == [mini.data_hash(task) for task in ("hotpotqa", "trec", "repobench-p")]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("narrativeqa", "453810d775b3c4fc"),
        ("trec", "7b59445c73fbc7ae"),
        ("passage_count", "f4eaf29d9ec74070"),
    ],
)
def test_the_same_in_every_version_of_python(task, expected):
    assert mini.data_hash(task)[:16] == expected


def test_hash_of_code_depends_on_the_version(monkeypatch):
    before = {task: mini.data_hash(task) for task in ("lcc", "trec")}
    monkeypatch.setattr(mini.platform, "python_version", lambda: "3.99.0")
    assert mini.data_hash("lcc") != before["lcc"] and mini.data_hash("trec") == before["trec"]


def test_rows_are_copies():
    mini.rows("trec").clear()
    assert len(mini.rows("trec")) == 20


def test_unknown_task():
    with pytest.raises(UserError, match="unknown LongBench task"):
        mini.rows("hotpot")


# Answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", QA)
def test_answers_are_in_the_text_and_not_in_the_question(task):
    for row in mini.rows(task):
        text = row["context"] + row["input"]
        question = row["input"].rpartition("Question:\n")[2]
        for answer in row["answers"]:
            assert answer in text
            assert answer not in question or " or " in question  # Which film came out first, A or B?


def test_film_that_came_out_first():
    for row in mini.rows("2wikimqa")[::3]:
        films = re.fullmatch(r"Which film came out first, (.*) or (.*)\?", row["input"]).groups()
        years = {film: re.search(rf"{film} is a film of (\d+)", row["context"])[1] for film in films}
        assert years[row["answers"][0]] == min(years.values()) != max(years.values())


@pytest.mark.parametrize("task", ["hotpotqa", "musique"])
def test_following_the_passages_gives_the_answer(task):
    for row in mini.rows(task):
        text = row["context"]
        named = [name for name in mini_texts.POOLS["company"] if name in row["input"]]
        for product in mini_texts.POOLS["product"]:
            if product in row["input"]:
                named.append(re.search(rf"(.*) is a company .* best known for the {product},", text)[1])
        assert len(named) == 1
        founder = re.search(rf"{named[0]} is a company that (.*) founded in", text)[1]
        life = rf"{founder} was born in (\w+) in (\d+)\..* became an? (.*) and opened .* \d+ (.*) and knew"
        found = re.search(life, text).groups()
        if task == "musique":
            fair = rf"{found[0]} is a town .* river (\w+)\. The fair in (\w+) .* for the (.*)\. The"
            found = re.search(fair, text).groups()
        assert row["answers"][0] in found


def test_unanswerable_and_yes_no():
    answers = Counter(row["answers"][0] for row in mini.rows("qasper"))
    assert (answers["unanswerable"], answers["yes"], answers["no"]) == (4, 2, 2)
    for row in mini.rows("qasper"):
        if row["answers"][0] not in ("unanswerable", "yes", "no"):
            assert row["answers"][0] in row["context"]
        for question, yes, no in mini_texts.YES_NO:
            assert (yes in row["context"]) != (no in row["context"])
            if row["input"] == question:
                assert row["answers"] == ["yes" if yes in row["context"] else "no"]


def test_summaries_say_what_the_text_says():
    for row in mini.rows("multi_news"):
        for sentence in re.split(r"(?<=\.) (?=[A-Z0-9])", row["answers"][0]):
            assert sentence in row["context"]
    for row in mini.rows("gov_report"):
        for sentence in re.split(r"(?<=\.) (?=[A-Z0-9])", row["answers"][0])[1:]:
            assert sentence in row["context"]
        assert row["input"] == ""
    for row in mini.rows("qmsum"):
        x, why_x, y, why_y, chosen = re.fullmatch(
            r"\w+ proposed (.*) because (.*)\. \w+ preferred (.*) because (.*)\. The group decided on (.*)\.",
            row["answers"][0],
        ).groups()
        assert y == chosen != x
        assert all(part in row["context"] for part in (x, why_x, y, why_y))
        topic = re.fullmatch(r"What did the group decide about (.*), and why\?", row["input"])[1]
        about = row["context"].split(topic, 1)[1].split("Project Manager: ", 2)[1]
        assert chosen in about


def test_count_of_paragraphs():
    for row in mini.rows("passage_count"):
        paragraphs = [text.split(": ", 1)[1] for text in row["context"].split("\n\n")]
        assert row["answers"] == [str(len(set(paragraphs)))] and len(paragraphs) == 18


def test_paragraph_of_the_abstract():
    for row in mini.rows("passage_retrieval_en"):
        trade, town, collection = re.search(
            r"about an? (.*) from (\w+), .* collection of (.*)\.", row["input"]
        ).groups()
        paragraphs = row["context"].split("\n\n")
        assert len(paragraphs) == 30
        hits = [p for p in paragraphs if f"{trade} and" in p and f"in {town} in" in p and collection in p]
        assert [hit.split(":")[0] for hit in hits] == row["answers"]


# Field habits (few-shot tasks and code) ---------------------------------------------------------------------


def test_trec_examples_are_consistent():
    real = {"Lasting time of somethin", "Invention, book and other creative piece", "Letter like a-z"}
    assert len(mini_texts.CLASSES) == len(set(mini_texts.CLASSES)) == 50 and real < set(mini_texts.CLASSES)
    assert not any(a != b and a in b for a in mini_texts.CLASSES for b in mini_texts.CLASSES)
    for row in mini.rows("trec"):
        assert row["all_classes"] == mini_texts.CLASSES and row["answers"][0] in mini_texts.CLASSES
        assert re.fullmatch(r"Question: .* \?\nType:", row["input"]) and not row["context"].endswith("\n")
        labels = re.findall(r"^Question: .*\nType: (.*)$", row["context"], re.MULTILINE)
        assert set(labels) <= set(mini_texts.CLASSES) and labels.count(row["answers"][0]) == 2
        assert row["input"].removesuffix("\nType:") not in row["context"]


def test_triviaqa_habits():
    for row in mini.rows("triviaqa"):
        assert row["input"].startswith("Passage:\n") and row["input"].endswith("\nAnswer:\n")
        assert re.fullmatch(r"(Passage:\n(.|\n)*?\nQuestion:\n.*\nAnswer:\n.+\n){6}", row["context"])


def test_samsum_habits():
    for row in mini.rows("samsum"):
        assert row["input"].startswith("Dialogue: ") and row["input"].endswith("\nSummary: ")
        assert "\r\n" in row["input"] and row["context"].endswith("\n")
        assert row["context"].count("Dialogue: ") == row["context"].count("\nSummary: ") == 10
        names = set(re.findall(r"^(?:Dialogue: )?(\w+): ", row["input"], re.MULTILINE)) - {"Summary"}
        assert len(names) == 2


def test_passages_are_numbered():
    for task in ("hotpotqa", "2wikimqa", "musique", "multi_news"):
        for row in mini.rows(task):
            numbers = [int(n) for n in re.findall(r"^Passage (\d+):$", row["context"], re.MULTILINE)]
            assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 4


@pytest.mark.parametrize("task", CODE)
def test_code_can_be_completed_by_reading(task):
    for row in mini.rows(task):
        (line,) = row["answers"]
        assert line.startswith("    ") and not any(mark in line for mark in ("`", "#", "//", "\n"))
        before = row["context"] + row["input"]
        assert before.endswith("\n") and (row["input"] == "") == (task == "lcc")
        assert set(re.findall(r"[^\W\d]\w*", line)) <= set(re.findall(r"[^\W\d]\w*", before))
        path = row["context"].split("\n", 1)[0]
        assert (re.fullmatch(r"[\w/]+\.py", path) is not None) == (task == "repobench-p")


def test_code_is_that_of_the_running_python():
    library = mini_code._library()
    for row in mini.rows("lcc"):
        (line,) = row["answers"]
        sources = (library / f"{name}.py" for name in mini_code._MODULES)
        assert any(f"{row['context']}{line}\n" in p.read_text("utf-8") for p in sources if p.is_file())


def test_python_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(mini_code, "_library", lambda: tmp_path)
    mini_code._source.cache_clear()
    try:
        with pytest.raises(UserError, match="only 0 of 20 code rows could be cut .* leave lcc and repobench-p out"):
            mini_code.lcc(20)
    finally:
        mini_code._source.cache_clear()
