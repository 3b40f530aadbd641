"""The metrics of LongBench, to the last digit.

They are defined by github.com/THUDM/LongBench at 2e00731f (LongBench/metrics.py and eval.py). Where the
official value depends on a bug it is kept, because all published numbers have it, and `score_true` stands
beside it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from eval.errors import UserError
from eval.rouge_l import exceeds_recursion, rouge_l, rouge_l_google
from eval.similarity import SIMILARITIES, Similarity, code_line, fuzz_ratio


class TaskMetric(NamedTuple):
    """How one task is scored.

    Attributes
    ----------
    metric
        Key of `METRIC_VERSIONS`.
    category
        LongBench's category, of which `mean_of_categories` takes one mean each.
    first_line
        Whether only the first line of a prediction is scored (`first_line`).
    """

    metric: str
    category: str
    first_line: bool = False


TASKS: dict[str, TaskMetric] = {
    "narrativeqa": TaskMetric("qa_f1", "single-document QA"),
    "qasper": TaskMetric("qa_f1", "single-document QA"),
    "multifieldqa_en": TaskMetric("qa_f1", "single-document QA"),
    "hotpotqa": TaskMetric("qa_f1", "multi-document QA"),
    "2wikimqa": TaskMetric("qa_f1", "multi-document QA"),
    "musique": TaskMetric("qa_f1", "multi-document QA"),
    "gov_report": TaskMetric("rouge_l", "summarization"),
    "qmsum": TaskMetric("rouge_l", "summarization"),
    "multi_news": TaskMetric("rouge_l", "summarization"),
    "trec": TaskMetric("classification", "few-shot learning", first_line=True),
    "triviaqa": TaskMetric("qa_f1", "few-shot learning", first_line=True),
    "samsum": TaskMetric("rouge_l", "few-shot learning", first_line=True),
    "passage_count": TaskMetric("count", "synthetic"),
    "passage_retrieval_en": TaskMetric("retrieval", "synthetic"),
    "lcc": TaskMetric("edit_similarity", "code"),
    "repobench-p": TaskMetric("edit_similarity", "code"),
}
LONGBENCH = tuple(TASKS)
LONGBENCH_E = tuple(f"{task}_e" for task in TASKS if task not in ("narrativeqa", "musique", "qmsum"))
TASKS |= {task: TASKS[task.removesuffix("_e")] for task in LONGBENCH_E}

# Raised by one with every change of a value. In each record: numbers of two versions never share a table.
METRIC_VERSIONS: dict[str, int] = {
    "qa_f1": 1,
    "rouge_l": 1,
    "rouge_l_google": 1,
    "classification": 1,
    "count": 1,
    "retrieval": 1,
    "edit_similarity": 1,
}

_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the words of prediction and answer, as multisets.

    Both are lower-cased, ASCII punctuation is deleted ("U.S." is "us", "state-of-the-art" is one word), the
    words a, an and the are dropped, and the rest is split at white space. 0 where no word is shared, else
    2PR/(P + R).

    Returns
    -------
    float
        A share in [0, 1].

    Notes
    -----
    LongBench's `qa_f1_score`, which is SQuAD's F1.
    """
    predicted, expected = _qa_words(prediction), _qa_words(answer)
    n_same = (Counter(predicted) & Counter(expected)).total()
    if not n_same:
        return 0.0
    precision, recall = n_same / len(predicted), n_same / len(expected)
    return 2 * precision * recall / (precision + recall)


def classification(prediction: str, answer: str, all_classes: Sequence[str], bug_compatible: bool = True) -> float:
    """1/k where the answer is among the k classes that the prediction names, else 0.

    A class is named where it is a substring, case and all. Named classes that are a proper part of the answer
    are taken out first; officially while the list is walked, so that the one after each of them is not looked
    at.

    Parameters
    ----------
    prediction, answer
        The model's text and the true class.
    all_classes
        The classes of this row, in its order.
    bug_compatible
        Skip as the official loop does; else every proper part is taken out.

    Returns
    -------
    float
        A share in [0, 1].

    Notes
    -----
    LongBench's `classification_score`. In TREC no class is part of another, so both readings agree there.
    """
    named = [name for name in all_classes if name in prediction]
    i = 0
    while i < len(named):
        if named[i] in answer and named[i] != answer:
            named.remove(named[i])
            i += bug_compatible  # the official loop moves on by itself
        else:
            i += 1
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the integers in the prediction that equal the answer as text ("07" is not "7"); 0 without any.

    Notes
    -----
    LongBench's `count_score`. Papers call it exact-match accuracy, which it is not: see `exact_match`.
    """
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """`count` against the number of the first "Paragraph N" in the answer.

    Raises
    ------
    UserError
        Where the answer names no paragraph.

    Notes
    -----
    LongBench's `retrieval_score`.
    """
    paragraph = re.search(r"Paragraph (\d+)", answer)
    if not paragraph:
        raise UserError(f'the reference {answer!r} names no paragraph, allowed is "Paragraph N"')
    return count(prediction, paragraph[1])


def exact_match(prediction: str, answer: str) -> float:
    """1 where the whole prediction, without white space around it, is the answer, else 0."""
    return float(prediction.strip() == answer.strip())


def edit_similarity(prediction: str, answer: str, similarity: Similarity, bug_compatible: bool = True) -> float:
    """Edit similarity of the predicted line of code (`code_line`) and the true one, in whole percents of 1.

    Parameters
    ----------
    prediction
        The completion; its first line without a comment mark is scored, indentation included.
    answer
        The next line of code.
    similarity
        Back end, see `fuzz_ratio`.
    bug_compatible
        Accept a blank line as the prediction, as LongBench does.

    Returns
    -------
    float
        A share in [0, 1].

    Notes
    -----
    LongBench's `code_sim_score`, with difflib where its requirements are followed to the letter.
    """
    return fuzz_ratio(code_line(prediction, skip_blank=not bug_compatible), answer, similarity) / 100


def first_line(prediction: str) -> str:
    r"""First line of a prediction after its leading newlines; only "\n" is one, so "\r\nyes" gives "\r"."""
    return prediction.lstrip("\n").split("\n", 1)[0]


def score_row(
    task: str,
    prediction: str,
    answers: Sequence[str],
    all_classes: Sequence[str] | None,
    similarity: Similarity,
) -> dict[str, float]:
    """All scores of one prediction, each the maximum over the answers.

    Parameters
    ----------
    task
        Key of `TASKS`.
    prediction
        What the model wrote, any text.
    answers
        The accepted answers of this row, at least one.
    all_classes
        The class names of this row; only classification reads them.
    similarity
        Back end of the edit similarity; the other metrics have none.

    Returns
    -------
    dict
        Shares in [0, 1]. `score`, always first, is the official one. Beside it `score_true` where the
        official one has a bug (ROUGE-L, classification, edit similarity), `rouge_l_google`, `exact_match`
        (count and retrieval), `edit_difflib` and `edit_levenshtein`.

    Raises
    ------
    UserError
        For an unknown task or back end, and for a row without usable answers or classes.
    """
    metric = task_metric(task)
    if similarity not in SIMILARITIES:
        raise UserError(f"similarity {similarity!r} is not one of {', '.join(SIMILARITIES)}")
    if not answers:
        raise UserError(f"{task}: a row has no answers, at least one is needed")
    text = first_line(prediction) if metric.first_line else prediction
    best: dict[str, float] = {}
    for answer in answers:
        for name, value in _score_pair(metric.metric, text, answer, all_classes, similarity).items():
            best[name] = max(best.get(name, 0.0), value)
    return best


def metric_status(task: str, prediction: str) -> Literal["ok", "empty"]:
    """Whether there is an answer: "empty" where what is scored is only white space and full stops."""
    text = first_line(prediction) if task_metric(task).first_line else prediction
    return "ok" if text.replace(".", " ").strip() else "empty"


def task_metric(task: str) -> TaskMetric:
    """The entry of `TASKS`, or a `UserError` that names the known tasks."""
    if task not in TASKS:
        raise UserError(f"unknown task {task!r}, known are {', '.join(TASKS)}")
    return TASKS[task]


def _score_pair(
    metric: str, prediction: str, answer: str, all_classes: Sequence[str] | None, similarity: Similarity
) -> dict[str, float]:
    """Scores of one prediction against one answer."""
    match metric:
        case "qa_f1":
            return {"score": qa_f1(prediction, answer)}
        case "rouge_l":
            true = rouge_l(prediction, answer, bug_compatible=False)
            official = 0.0 if exceeds_recursion(prediction, answer) else true
            return {
                "score": official,
                "score_true": true,
                "rouge_l_google": rouge_l_google(prediction, answer),
            }
        case "classification":
            if not all_classes:
                raise UserError("all_classes is missing, and classification needs the names of all classes")
            return {
                "score": classification(prediction, answer, all_classes),
                "score_true": classification(prediction, answer, all_classes, bug_compatible=False),
            }
        case "count":
            return {"score": count(prediction, answer), "exact_match": exact_match(prediction, answer)}
        case "retrieval":
            return {"score": retrieval(prediction, answer), "exact_match": exact_match(prediction, answer)}
        case "edit_similarity":
            edits = {f"edit_{name}": edit_similarity(prediction, answer, name) for name in SIMILARITIES}
            true = edit_similarity(prediction, answer, similarity, bug_compatible=False)
            return {"score": edits[f"edit_{similarity}"], "score_true": true, **edits}
    raise ValueError(f"no metric {metric!r}")


def _qa_words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_DROP_PUNCTUATION)).split()
