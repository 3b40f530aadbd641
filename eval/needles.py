"""The needles that are hidden, and the scores of an answer about one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score import rouge_scorer


@dataclass(frozen=True)
class Needle:
    """A fact that no haystack hints at.

    Attributes
    ----------
    text
        The sentence that is hidden.
    question, answer
        The question put to the model and the part of `text` that answers it.
    key_phrases
        All of them occur in a right answer, however it is worded.
    """

    text: str
    question: str
    answer: str
    key_phrases: tuple[str, ...]


def _needle(subject: str, answer: str, *key_phrases: str) -> Needle:
    """A needle of the form of the original test: "The <subject> is <answer>"."""
    return Needle(f"The {subject} is {answer}", f"What is the {subject}?", answer, key_phrases)


NEEDLES: dict[str, Needle] = {
    "dolores": _needle(
        "best thing to do in San Francisco",
        "eat a sandwich and sit in Dolores Park on a sunny day.",
        "sandwich",
        "Dolores Park",
    ),
    "ottoline": _needle(
        "dish that won the Ottoline fair",
        "pumpkin soup with ginger and a spoonful of roasted hazelnuts on top.",
        "pumpkin soup",
        "hazelnuts",
    ),
    "kestrel": _needle(
        "password of the Kestrel laboratory",
        "seven purple lizards marching home under a silver moon.",
        "purple lizards",
        "silver moon",
    ),
    "marlow": _needle(
        "favourite hobby of Admiral Marlow",
        "carving tiny wooden whales while listening to the opera.",
        "wooden whales",
        "the opera",
    ),
    "tarragon": _needle(
        "safest place to hide during the Tarragon festival",
        "behind the red piano in the cellar of the old theatre.",
        "red piano",
        "theatre",
    ),
    "zephyr": _needle(
        "reason why the Zephyr rocket was delayed",
        "a family of owls that had built a nest inside the launch tower.",
        "family of owls",
        "launch tower",
    ),
    "quill": _needle(
        "present that Aunt Quill sends every birthday",
        "a jar of blackberry jam and a pair of yellow socks.",
        "blackberry jam",
        "yellow socks",
    ),
    "basilworth": _needle(
        "only rule of the Basilworth school",
        "never to whistle near the swimming pool after the evening bell.",
        "whistle",
        "swimming pool",
    ),
    "orrin": _needle(
        "first thing to pack for a journey to Lake Orrin",
        "a blue umbrella together with a bag of dried apricots.",
        "blue umbrella",
        "dried apricots",
    ),
}


def overlap(prediction: str, answer: str) -> float:
    """Share of the answer's words that occur in the prediction, 0 to 1.

    Words are lower-cased and split at white space only, so "day" and "day." differ: the heat-map score of
    KVCache-Factory (`scripts/scripts_needle/visualize.py`) and of the paper's Fig. 4.
    """
    words = set(answer.lower().split())
    return len(words & set(prediction.lower().split())) / len(words)


def rouge1(prediction: str, needle: str) -> float:
    """ROUGE-1 F1 of Google's `rouge-score` with its stemmer between needle and prediction, times 10.

    The score in the JSON files of KVCache-Factory. The reference is the whole needle, so that a right answer
    which does not repeat the words of the question stays below 10.
    """
    return 10 * _rouge().score(needle, prediction)["rouge1"].fmeasure


def contains(prediction: str, key_phrases: Sequence[str]) -> float:
    """1.0 where every key phrase occurs in the prediction, whatever the case and the wording around it."""
    text = " ".join(prediction.lower().split())
    return float(all(phrase.lower() in text for phrase in key_phrases))


@cache
def _rouge() -> rouge_scorer.RougeScorer:
    from rouge_score import rouge_scorer  # brings nltk and scikit-learn: a second that other tasks need not pay

    return rouge_scorer.RougeScorer(["rouge1"], use_stemmer=True)


SCORES: dict[str, Callable[[str, Needle], float]] = {
    "overlap": lambda text, needle: overlap(text, needle.answer),
    "rouge1": lambda text, needle: rouge1(text, needle.text),
    "contains": lambda text, needle: contains(text, needle.key_phrases),
}
