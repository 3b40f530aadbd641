"""The metrics of LongBench word by word from their definitions, in plain loops."""

from __future__ import annotations

import re


def rouge_l(prediction: str, reference: str, max_steps: int | None = None) -> float:
    """ROUGE-L of the `rouge` package; 0 where a walk takes more than `max_steps` steps."""
    predicted, referenced = sentences(prediction), sentences(reference)
    if not predicted or not referenced:
        return 0.0
    union: set[str] = set()
    for r in referenced:
        for h in predicted:
            words, steps = walk(r, h)
            if max_steps is not None and steps > max_steps:
                return 0.0
            union |= set(words)
    p = len(union) / len({word for h in predicted for word in h})
    r = len(union) / len({word for r in referenced for word in r})
    return 2 * p * r / (p + r + 1e-8)


def sentences(text: str) -> list[list[str]]:
    """Words of the sentences between full stops."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if len(piece) > 0]


def walk(r: list[str], h: list[str]) -> tuple[list[str], int]:
    """Words of the LCS that the walk back from the end finds, and its steps."""
    table = lcs_table(r, h)
    i, j, words, steps = len(r), len(h), [], 0
    while i > 0 and j > 0:
        steps += 1
        if r[i - 1] == h[j - 1]:
            words.append(r[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words, steps


def lcs_table(a, b) -> list[list[int]]:
    """Lengths of the longest common subsequences of all beginnings."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            if a[i - 1] == b[j - 1]:
                table[i][j] = table[i - 1][j - 1] + 1
            else:
                table[i][j] = max(table[i - 1][j], table[i][j - 1])
    return table


def rouge_l_google(prediction: str, reference: str) -> float:
    """ROUGE-L of the `rouge-score` package."""
    p, r = (re.sub("[^a-z0-9]+", " ", text.lower()).split() for text in (prediction, reference))
    return f1(lcs_table(r, p)[-1][-1], len(p), len(r))


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the multisets of words."""
    predicted, expected = qa_words(prediction), qa_words(answer)
    left, same = list(expected), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            same += 1
    return f1(same, len(predicted), len(expected))


def qa_words(text: str) -> list[str]:
    """Words of the lower-cased text without ASCII punctuation and articles."""
    kept = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def f1(same: int, n_predicted: int, n_expected: int) -> float:
    """Harmonic mean of precision and recall, 0 where nothing is the same."""
    if same == 0:
        return 0.0
    p, r = same / n_predicted, same / n_expected
    return 2 * p * r / (p + r)


def classification(prediction: str, answer: str, all_classes: list[str], bug: bool = True) -> float:
    """Credit 1/k; the bug is to shorten the list that is walked."""
    named = [c for c in all_classes if c in prediction]
    for c in named if bug else list(named):
        if c in answer and c != answer:
            named.remove(c)
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the runs of digits that are the answer."""
    numbers = re.findall("[0-9]+" if prediction.isascii() else r"\d+", prediction)
    return sum(number == answer for number in numbers) / len(numbers) if numbers else 0.0


def fuzz_ratio(a: str, b: str, similarity: str) -> int:
    """Whole percent of fuzzywuzzy; difflib's without its heuristic for 200 characters and more."""
    if a == b:
        return 100
    if not a or not b:
        return 0
    n = len(a) + len(b)
    if similarity == "difflib":
        return int(round(100 * (2.0 * matching(a, b) / n)))
    return int(round(100 * (1.0 - (n - 2 * lcs_table(a, b)[-1][-1]) / n)))


def matching(a: str, b: str) -> int:
    """Characters in the longest common block (first in a, then in b) and in those on both sides of it."""
    best = (0, 0, 0)
    for i in range(len(a)):
        for j in range(len(b)):
            k = 0
            while i + k < len(a) and j + k < len(b) and a[i + k] == b[j + k]:
                k += 1
            if k > best[2]:
                best = (i, j, k)
    i, j, k = best
    return k and matching(a[:i], b[:j]) + k + matching(a[i + k :], b[j + k :])


def code_line(prediction: str, skip_blank: bool = False) -> str:
    """First line without a mark of comments or of a fence."""
    text = prediction
    while text.startswith("\n"):
        text = text[1:]
    good = [x for x in text.split("\n") if "`" not in x and "#" not in x and "//" not in x]
    if skip_blank:
        good = [x for x in good if x.strip()]
    return good[0] if good else ""
