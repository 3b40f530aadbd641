"""Metrics against golden values, naive references, the packages they stand for, and published predictions."""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import metrics as naive
from rouge_score.rouge_scorer import RougeScorer

from eval import averages, metrics, similarity
from eval.errors import UserError
from eval.metrics import score_row
from eval.rouge_l import _union_lcs, _walk_steps, exceeds_recursion, rouge_l, rouge_l_google
from eval.similarity import SIMILARITIES, code_line, fuzz, fuzz_ratio

ROOT = Path(__file__).resolve().parents[2]
PREDICTIONS = Path(os.environ.get("GRAPHKV_SHARED", ROOT.parent / "shared")) / "data/longbench_preds"
GOLDEN = json.loads((ROOT / "tests/data/metric_cases.json").read_text("utf-8"))
BACK_ENDS = {
    "viridisGreen__llama2-7b-chat-4k": "difflib",
    "JFan1997__phi-2": "levenshtein",
    "JFan1997__gemma-2b_partial": "levenshtein",
    "delsiiin__vicuna-v1.3-7b": "difflib",
    "kotmul__llama3-8b-inst_E": "difflib",
}
patient = settings(deadline=None)  # on a busy machine any example may take long
published = pytest.mark.skipif(not PREDICTIONS.is_dir(), reason=f"no published predictions in {PREDICTIONS}")

# Any text at all, lone surrogates included, and texts of few words so that much is shared.
anything = st.text(st.characters(exclude_categories=()))
pieces = "a the b c The U.S 3 12 é x, . .. \n \r\n \t # ` // Paragraph İ ² ١".split(" ") + [
    " ",
    "\n",
    ". ",
    "",
]
texts = (
    anything
    | st.lists(st.sampled_from(pieces), max_size=40).map(" ".join)
    | st.lists(st.sampled_from(pieces), max_size=40).map("".join)
)
classes = st.lists(st.sampled_from(["a", "b", "ab", "abc", "c", "bc", "", "é"]), min_size=1, max_size=8)


def close(value: float) -> object:
    """Equal but for the order of floating-point operations."""
    return pytest.approx(value, abs=1e-12)


# --- golden values (research/cases.md, section 10)
# --------------------------------------------------------------


@pytest.mark.parametrize(("prediction", "reference", "value"), GOLDEN["rouge_l_f_longbench"])
def test_rouge_l_golden(prediction, reference, value):
    assert rouge_l(prediction, reference) == close(value)


def test_rouge_l_google_golden():
    pairs = GOLDEN["rouge_l_f_longbench"][: len(GOLDEN["rouge_l_f_google_for_contrast"])]
    got = [round(rouge_l_google(prediction, reference), 6) for prediction, reference, _ in pairs]
    assert got == GOLDEN["rouge_l_f_google_for_contrast"]


@pytest.mark.parametrize(
    ("prediction", "reference", "official", "google"),
    [
        ("The cat sat on the mat.", "the cat sat on the mat", 0.909, 1.0),
        ("A b c. D e f.", "D e f. A b c.", 1.0, 0.5),
        ("the the the the", "the cat", 0.667, 0.333),
        ("Hello, world", "Hello world", 0.5, 1.0),
        ("Foo bar.\n", "Foo bar", 0.8, 1.0),
        (
            "Hannah is watching the game. James is going to work.",
            "James is heading to work so he's not watching the game.",
            0.7,
            0.364,
        ),
    ],
)
def test_two_rouge_l(prediction, reference, official, google):
    assert round(rouge_l(prediction, reference), 3) == official
    assert round(rouge_l_google(prediction, reference), 3) == google


def test_rouge_recursion_golden():
    case = GOLDEN["rouge_recursion"]
    long, short = ("word " * case[key] for key in ("same_text_words", "same_text_words_ok"))
    assert rouge_l(long, long) == case["official"]
    assert rouge_l(long, long, bug_compatible=False) == close(0.999999995)
    assert round(rouge_l(long, long, bug_compatible=False), 6) == case["true"]
    assert rouge_l(short, short) == close(case["value"])
    row = score_row("qmsum", long, [long], None, "difflib")
    assert (row["score"], row["score_true"]) == (case["official"], close(0.999999995))


@pytest.mark.parametrize("installed", [similarity.INSTALLED, None])
def test_fuzz_ratio_golden(monkeypatch, installed):
    """With and without the help of fuzzywuzzy; "tide" and "diet" differ by their order with difflib."""
    monkeypatch.setattr(similarity, "INSTALLED", installed)
    for (a, b, indel), ratcliff in zip(
        GOLDEN["fuzz_ratio_levenshtein_int"], GOLDEN["fuzz_ratio_difflib_int_for_contrast"], strict=True
    ):
        assert fuzz_ratio(a, b, "levenshtein") == indel
        assert fuzz_ratio(a, b, "difflib") == ratcliff


@pytest.mark.parametrize(("prediction", "answer", "names", "value"), GOLDEN["classification_official"])
def test_classification_golden(prediction, answer, names, value):
    assert metrics.classification(prediction, answer, names) == value
    true = 0.0 if answer not in prediction else 1.0
    assert metrics.classification(prediction, answer, names, bug_compatible=False) == true


@pytest.mark.parametrize(
    ("metric", "case"), [(name, case) for name in ("count", "retrieval", "qa_f1") for case in GOLDEN[name]]
)
def test_short_answers_golden(metric, case):
    *texts, value = case
    got = getattr(metrics, metric)(*texts)
    assert got == value
    assert isinstance(got, float)


@pytest.mark.parametrize(("prediction", "answer", "value"), GOLDEN["code_sim_official"])
def test_edit_similarity_golden(prediction, answer, value):
    assert metrics.edit_similarity(prediction, answer, "difflib") == value


def test_blank_code_line_is_the_bug():
    row = score_row("lcc", " \n    return x", ["    return x"], None, "difflib")
    assert (row["score"], row["score_true"]) == (0.15, 1.0)


# --- against the naive references
# -------------------------------------------------------------------------------


@patient
@given(texts, texts)
def test_rouge_l_equals_naive(prediction, reference):
    assert rouge_l(prediction, reference) == close(naive.rouge_l(prediction, reference))
    assert rouge_l_google(prediction, reference) == close(naive.rouge_l_google(prediction, reference))


@pytest.mark.parametrize("seed", range(60))
def test_union_has_the_words_of_the_walk(seed):
    """Long sentences (many bytes of columns), short ones (one word), repeats, blank and empty words."""
    draw = random.Random(seed)
    vocabulary = [f"w{i}" for i in range(draw.choice([2, 5, 30, 200]))] + [""]
    predicted, referenced = (
        [[draw.choice(vocabulary) for _ in range(draw.choice([1, 3, 20, 90]))] for _ in range(draw.randint(1, 6))]
        for _ in range(2)
    )
    shared = {w for s in predicted for w in s} & {w for s in referenced for w in s}
    walks = [naive.walk(r, h) for r in referenced for h in predicted]
    assert _union_lcs(predicted, referenced, shared) == {word for words, _ in walks for word in words}
    assert [_walk_steps(h, r) for r in referenced for h in predicted] == [steps for _, steps in walks]


@pytest.mark.parametrize(
    ("prediction", "reference", "steps"),
    [
        ("a " * 990, "a " * 990, 990),
        ("a " * 991, "a " * 991, 991),
        ("b " * 990, "a", 990),  # nothing shared: the walk goes left through the whole sentence
        ("b " * 991, "a", 991),
        ("a", "a " + "b " * 989, 990),  # the row rises, so the walk goes up
        ("b a", "b " + "a " * 989 + "c", 991),
        ("x. " + "b " * 991 + ". y", "a. y", 991),
    ],
)
def test_recursion_limit(prediction, reference, steps):
    walks = [naive.walk(r, h)[1] for r in naive.sentences(reference) for h in naive.sentences(prediction)]
    assert max(walks) == steps
    assert exceeds_recursion(prediction, reference) == (steps > 990)
    assert rouge_l(prediction, reference) == close(naive.rouge_l(prediction, reference, 990))
    assert rouge_l(prediction, reference, False) == close(naive.rouge_l(prediction, reference))


@patient
@given(texts, texts)
def test_qa_f1_and_count_equal_naive(prediction, answer):
    assert metrics.qa_f1(prediction, answer) == close(naive.qa_f1(prediction, answer))
    assert metrics.count(prediction, answer) == close(naive.count(prediction, answer))


@patient
@given(texts, st.integers(0, 40))
def test_retrieval_equals_count(prediction, n):
    assert metrics.retrieval(prediction, f"Paragraph {n}") == naive.count(prediction, str(n))


@patient
@given(st.text("abc é", max_size=12), classes, st.data())
def test_classification_equals_naive(prediction, names, data):
    answer = data.draw(st.sampled_from(names))
    assert metrics.classification(prediction, answer, names) == naive.classification(prediction, answer, names)
    true = metrics.classification(prediction, answer, names, bug_compatible=False)
    assert true == naive.classification(prediction, answer, names, bug=False)
    assert true >= metrics.classification(prediction, answer, names)


@patient
@given(texts, st.booleans())
def test_code_line_equals_naive(prediction, skip_blank):
    assert code_line(prediction, skip_blank) == naive.code_line(prediction, skip_blank)


@patient
@given(
    st.text("ab \t", max_size=16) | anything,
    st.text("ab \t", max_size=16) | anything,
    st.sampled_from(SIMILARITIES),
)
def test_fuzz_ratio_equals_naive(a, b, name):
    assert fuzz_ratio(a, b, name) == naive.fuzz_ratio(a, b, name)


@patient
@given(texts, st.sampled_from(list(metrics.TASKS)), st.lists(texts, min_size=1, max_size=3), classes)
def test_scores_never_raise_and_stay_in_bounds(prediction, task, answers, names):
    if metrics.TASKS[task].metric == "retrieval":
        answers = [f"Paragraph {i}" for i in range(len(answers))]
    row = score_row(task, prediction, answers, names, "levenshtein")
    assert next(iter(row)) == "score"
    assert all(0.0 <= value <= 1.0 and isinstance(value, float) for value in row.values())
    assert metrics.metric_status(task, prediction) in ("ok", "empty")
    singles = [score_row(task, prediction, [answer], names, "levenshtein")["score"] for answer in answers]
    assert row["score"] == max(singles)


# --- against the packages
# ---------------------------------------------------------------------------------------


@patient
@given(texts, texts)
def test_rouge_l_google_equals_the_package(prediction, reference):
    theirs = RougeScorer(["rougeL"]).score(reference, prediction)["rougeL"].fmeasure
    assert rouge_l_google(prediction, reference) == close(theirs)


@patient
@given(texts, texts)
def test_rouge_l_equals_the_package(prediction, reference):
    package = pytest.importorskip("rouge", reason="rouge 1.0.1 is not installed (pip install rouge==1.0.1)")
    try:
        scores = package.Rouge().get_scores([prediction], [reference], avg=True)
        theirs = scores["rouge-l"]["f"]
    except ValueError:  # "Hypothesis is empty."
        theirs = 0.0
    assert rouge_l(prediction, reference) == close(theirs)


@patient
@given(st.text(max_size=300) | texts, st.text(max_size=300) | texts)
def test_installed_back_end_equals_fuzzywuzzy(a, b):
    """By fuzzywuzzy itself, and by its rules: what another installation computes must be the same."""
    theirs = fuzz.ratio(a, b)
    assert fuzz_ratio(a, b, similarity.INSTALLED) == theirs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarity, "INSTALLED", None)
        for name in SIMILARITIES:
            by_rules = fuzz_ratio(a, b, name)
            assert isinstance(by_rules, int)
            if (fuzz.SequenceMatcher.__module__ == "difflib") == (name == "difflib"):
                assert by_rules == theirs


# --- rules
# ------------------------------------------------------------------------------------------------------


def test_task_table():
    """M12: names and metrics of the 16 tasks, as data."""
    assert {task: spec.metric for task, spec in metrics.TASKS.items() if task in metrics.LONGBENCH} == {
        **dict.fromkeys("narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa".split(), "qa_f1"),
        **dict.fromkeys("gov_report qmsum multi_news samsum".split(), "rouge_l"),
        "trec": "classification",
        "passage_count": "count",
        "passage_retrieval_en": "retrieval",
        **dict.fromkeys(["lcc", "repobench-p"], "edit_similarity"),
    }
    assert [task for task in metrics.LONGBENCH if metrics.TASKS[task].first_line] == [
        "trec",
        "triviaqa",
        "samsum",
    ]
    assert len(metrics.LONGBENCH) == 16
    assert {f"{task}_e" for task in metrics.LONGBENCH} - set(metrics.LONGBENCH_E) == {
        "narrativeqa_e",
        "musique_e",
        "qmsum_e",
    }
    assert all(metrics.TASKS[task] == metrics.TASKS[task[:-2]] for task in metrics.LONGBENCH_E)
    used = {spec.metric for spec in metrics.TASKS.values()}
    assert metrics.METRIC_VERSIONS.keys() == used | {"rouge_l_google"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("yes", "yes"),
        ("\n\nyes\nno", "yes"),
        ("\r\nyes", "\r"),
        (" \nyes", " "),
        ("", ""),
        ("\n", ""),
        ("yes\x0bno\u2028", "yes\x0bno\u2028"),
    ],
)
def test_first_line(text, line):
    assert metrics.first_line(text) == line
    assert score_row("triviaqa", text, ["yes"], None, "difflib")["score"] == metrics.qa_f1(line, "yes")


def test_only_three_tasks_keep_the_first_line():
    answer = "\nyes\nno no no"
    assert score_row("triviaqa", answer, ["yes"], None, "difflib")["score"] == 1.0
    assert score_row("hotpotqa", answer, ["yes"], None, "difflib")["score"] == 0.4


@pytest.mark.parametrize("prediction", ["", ".", "...", "\n", " ", " \r\n .", "\u3000"])
def test_empty_predictions(prediction):
    """M3: 0 with a status of their own, not a swallowed exception."""
    for task in metrics.LONGBENCH:
        answers = ["Paragraph 3"]
        assert metrics.metric_status(task, prediction) == "empty"
        if metrics.TASKS[task].metric != "edit_similarity":
            assert score_row(task, prediction, answers, ["Paragraph 3"], "difflib")["score"] == 0.0


@pytest.mark.parametrize("prediction", ["None", "NA", "nan", "null", "0", "False"])
def test_words_for_nothing_are_words(prediction):
    assert metrics.metric_status("qasper", prediction) == "ok"
    assert score_row("qasper", prediction, [prediction], None, "difflib")["score"] == 1.0


def test_each_row_has_its_own_classes():
    assert score_row("trec", "a b", ["a"], ["a", "b"], "difflib")["score"] == 0.5
    assert score_row("trec", "a b", ["a"], ["a", "c"], "difflib")["score"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("narrative", "x", ["x"], None, "difflib"), "unknown task 'narrative', known are narrativeqa, "),
        (("qasper", "x", [], None, "difflib"), "qasper: a row has no answers"),
        (("trec", "x", ["x"], None, "difflib"), "all_classes is missing"),
        (("passage_retrieval_en", "x", ["3"], None, "difflib"), "the reference '3' names no paragraph"),
        (("qasper", "x", ["x"], None, "fuzzy"), "similarity 'fuzzy' is not one of difflib, levenshtein"),
    ],
)
def test_bad_rows(arguments, says):
    with pytest.raises(UserError, match=says):
        score_row(*arguments)
    with pytest.raises(UserError, match="similarity None is not one of"):
        fuzz_ratio("a", "b", None)


def test_means_need_every_task():
    scores = dict.fromkeys(metrics.LONGBENCH, 50.0) | {"lcc": 66.0, "qasper_e": 0.0}
    assert averages.mean_of_tasks(scores) == 51.0
    assert averages.mean_of_categories(scores) == 51.33
    for task in metrics.LONGBENCH:
        missing = {name: score for name, score in scores.items() if name != task}
        assert averages.mean_of_tasks(missing) is None
        assert averages.mean_of_categories(missing) is None
    with pytest.raises(UserError, match="without rows"):
        averages.task_score([])


def test_categories():
    sizes = {}
    for task in metrics.LONGBENCH:
        sizes.setdefault(metrics.TASKS[task].category, []).append(task)
    assert sorted(map(len, sizes.values())) == [2, 2, 3, 3, 3, 3]


def test_buckets():
    lengths = [0, 3999, 4000, 7999, 8000, 10**6]
    assert averages.bucket_scores([1.0, 0.0, 0.25, 0.25, 1.0, 1.0], lengths) == {
        "0-4k": 50.0,
        "4-8k": 25.0,
        "8k+": 100.0,
    }
    assert averages.bucket_scores([1.0], [4000]) == {"0-4k": None, "4-8k": 100.0, "8k+": None}


# --- published predictions
# --------------------------------------------------------------------------------------


@cache
def rows_of(folder: str, task: str) -> tuple[list[dict], list[dict[str, float]]]:
    """Rows of a file and all their scores with the back end of the folder."""
    lines = (PREDICTIONS / folder / f"{task}.jsonl").read_text("utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    return rows, [score_row(task, row["pred"], row["answers"], row["all_classes"], BACK_ENDS[folder]) for row in rows]


def stored(folder: str, name: str) -> dict:
    """A JSON file beside the predictions."""
    return json.loads((PREDICTIONS / folder / name).read_text("utf-8"))


@published
@pytest.mark.parametrize("folder", BACK_ENDS)
def test_published_scores(folder):
    official = stored(folder, "published_result.json")
    assert official
    for task, score in official.items():
        rows, scores = rows_of(folder, task)
        values = [row["score"] for row in scores]
        if isinstance(score, dict):
            assert averages.bucket_scores(values, [row["length"] for row in rows]) == score, task
        else:
            assert averages.task_score(values) == score, task


@published
@pytest.mark.parametrize("folder", BACK_ENDS)
def test_published_rows(folder):
    """Each row within 1e-9 of the official code's, with both back ends."""
    for task, values in stored(folder, "row_scores_official_difflib.json").items():
        _, scores = rows_of(folder, task)
        code = metrics.TASKS[task].metric == "edit_similarity"
        assert [row["edit_difflib" if code else "score"] for row in scores] == pytest.approx(values, abs=1e-9), task
        if code:
            indel = stored(folder, "row_scores_official_levenshtein.json")[task]
            assert [row["edit_levenshtein"] for row in scores] == pytest.approx(indel, abs=1e-9), task


@published
@pytest.mark.parametrize(
    ("folder", "task", "name", "value"),
    [
        ("viridisGreen__llama2-7b-chat-4k", "gov_report", "rouge_l_google", 17.94),
        ("viridisGreen__llama2-7b-chat-4k", "qmsum", "rouge_l_google", 18.85),
        ("viridisGreen__llama2-7b-chat-4k", "multi_news", "rouge_l_google", 18.89),
        ("viridisGreen__llama2-7b-chat-4k", "samsum", "rouge_l_google", 36.89),
        ("JFan1997__phi-2", "gov_report", "rouge_l_google", 19.02),
        ("JFan1997__phi-2", "qmsum", "rouge_l_google", 11.64),
        ("JFan1997__phi-2", "multi_news", "rouge_l_google", 16.60),
        ("viridisGreen__llama2-7b-chat-4k", "lcc", "edit_levenshtein", 60.87),
        ("viridisGreen__llama2-7b-chat-4k", "repobench-p", "edit_levenshtein", 54.45),
        ("JFan1997__phi-2", "lcc", "edit_difflib", 58.36),
        ("JFan1997__phi-2", "repobench-p", "edit_difflib", 51.96),
        ("viridisGreen__llama2-7b-chat-4k", "passage_count", "exact_match", 0.0),
        ("viridisGreen__llama2-7b-chat-4k", "passage_retrieval_en", "exact_match", 1.0),
        ("JFan1997__phi-2", "passage_retrieval_en", "exact_match", 8.0),
        ("JFan1997__phi-2", "trec", "score_true", 52.5),
    ],
)
def test_values_beside_the_official_ones(folder, task, name, value):
    """The contrasts that research/longbench.md (sections 7, 8, 10) found with the packages themselves."""
    _, scores = rows_of(folder, task)
    assert averages.task_score([row[name] for row in scores]) == value
