"""ROUGE-L in the two readings that papers call by that name.

`rouge_l` is LongBench's, the one of the `rouge` package; `rouge_l_google` is that of the `rouge-score`
package. On the same summaries they differ by 2 to 11 points. Both keep a row of the table of longest common
subsequences (LCS) in one integer, whose bit j is 0 where the row rises by one from column j to column j + 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from struct import pack, unpack

# `rouge` walks back by recursion and Python stops it at 1,000 frames: 990 steps, called by LongBench's
# eval.py.
MAX_STEPS = 990

_REVERSED_BYTES = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def rouge_l(prediction: str, reference: str, bug_compatible: bool = True) -> float:
    """ROUGE-L as LongBench computes it.

    Texts are cut into sentences at every ".", sentences into words at white space; case and all other
    punctuation count. With H and G the sets of words of prediction and reference, and U the set of the words
    on one LCS (`_union_lcs`) of any pair of a prediction and a reference sentence, P = |U|/|H|, R = |U|/|G|,
    and the score is 2PR/(P + R + 1e-8): equal texts score 0.999999995.

    Parameters
    ----------
    prediction, reference
        The two texts, in any state.
    bug_compatible
        Score 0 also where the `rouge` package fails by recursion: LongBench swallows the exception.

    Returns
    -------
    float
        A share in [0, 1]; 0 where a text has no sentence ("", "...").

    Notes
    -----
    Equal to `Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]` of rouge 1.0.1
    (github.com/pltrdy/rouge) as LongBench calls it (github.com/THUDM/LongBench 2e00731f, metrics.py).
    """
    predicted, referenced = _sentences(prediction), _sentences(reference)
    if not predicted or not referenced or (bug_compatible and _exceeds_recursion(predicted, referenced)):
        return 0.0
    words_p, words_r = set().union(*predicted), set().union(*referenced)
    n_union = len(_union_lcs(predicted, referenced, words_p & words_r))
    precision, recall = n_union / len(words_p), n_union / len(words_r)
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def exceeds_recursion(prediction: str, reference: str) -> bool:
    """Whether `rouge` fails on these texts by recursion, so that the row officially scores 0.

    True where the walk back through the table of any pair of sentences takes more than `MAX_STEPS` steps.
    """
    return _exceeds_recursion(_sentences(prediction), _sentences(reference))


def rouge_l_google(prediction: str, reference: str) -> float:
    """ROUGE-L as the `rouge-score` package computes it, without stemming.

    Words are the runs of a-z and 0-9 in the lower-cased text. With L the length of the LCS of the two lists
    of words, P = L/len(prediction) and R = L/len(reference), the score is 2PR/(P + R).

    Returns
    -------
    float
        A share in [0, 1]; 0 where nothing is shared.

    Notes
    -----
    Equal to `RougeScorer(["rougeL"]).score(reference, prediction)["rougeL"].fmeasure` of rouge-score 0.1.2.
    """
    predicted, referenced = (re.findall("[a-z0-9]+", text.lower()) for text in (prediction, reference))
    columns = _columns(predicted)
    row = full = (1 << len(predicted)) - 1
    for word in referenced:
        if word in columns:
            row = _next_row(row, columns[word], full)
    common = len(predicted) - row.bit_count()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(referenced)
    return 2 * precision * recall / (precision + recall)


def _sentences(text: str) -> list[list[str]]:
    """Words of each sentence as `rouge` cuts them; a blank sentence has one word, the empty one."""
    return [piece.split() or [""] for piece in text.split(".") if piece]


def _columns(words: Iterable[str]) -> dict[str, int]:
    """For each word the columns that hold it, as bits."""
    columns: dict[str, int] = {}
    for j, word in enumerate(words):
        columns[word] = columns.get(word, 0) | 1 << j
    return columns


def _next_row(row: int, equal: int, inside: int) -> int:
    """Next row of the LCS table, given the columns equal to its word (Crochemore et al., IPL 80, 2001)."""
    rising = row & equal
    return ((row + rising) | (row ^ rising)) & inside


def _union_lcs(predicted: Sequence[Sequence[str]], referenced: Sequence[Sequence[str]], shared: set[str]) -> set[str]:
    """Union of the words on the LCS of every pair of sentences; `shared` are the words of both texts.

    Which LCS is part of the definition: from the last row i (reference) and column j (prediction) of the
    table T, take the word and go to (i-1, j-1) where the words are equal, else go up where T[i-1][j] >
    T[i][j-1], else left.

    Where the words differ, T[i-1][j] > T[i][j-1] says that row i rises at j. Where they are equal but to the
    right of the row's last rise, they are equal at that rise, too, for T is larger there than above it and to
    its left. So the walk takes the same words if it goes left to the last rise of each row first, and rows
    without equal words do not matter.

    All prediction sentences are columns of one integer, each followed by a bit that stays 0, which neither a
    carry nor a cursor crosses. With the bits reversed, one addition moves the cursors of all sentences: the
    carry runs to the next rise.
    """
    columns = dict.fromkeys(shared, 0)
    inside = last = 0
    bit = 1
    for sentence in predicted:
        first = bit
        for word in sentence:
            if word in shared:  # the other columns never rise
                columns[word] |= bit
                bit <<= 1
        if bit > first:
            inside |= bit - first
            last |= bit >> 1
            bit <<= 1
    n_bytes = max(8, (bit.bit_length() + 7) // 8)
    r_inside, r_last, *r_equals = _reversed_bits([*columns.values(), last, inside], n_bytes)
    r_columns = dict(zip(reversed(columns), r_equals, strict=True))

    union: set[str] = set()
    for sentence in referenced:
        words = [word for word in sentence if word in shared]
        if union.issuperset(words):
            continue  # nothing to add
        row, rises = inside, []
        for word in words:
            rising = row & columns[word]  # `_next_row`, inlined: this loop is the cost of the metric
            row = ((row + rising) | (row ^ rising)) & inside
            rises.append(row ^ inside)
        cursors = r_last
        for rise, word in zip(_reversed_bits(rises, n_bytes), reversed(words), strict=True):
            cursors = ((rise ^ r_inside) + cursors) & rise
            taken = cursors & r_columns[word]
            if taken:
                union.add(word)
                cursors = (cursors ^ taken) | taken << 1
            if not cursors:
                break
    return union


def _reversed_bits(rows: Sequence[int], n_bytes: int) -> Sequence[int]:
    """The rows, last one first, each with its 8·`n_bytes` bits reversed."""
    if n_bytes == 8:
        return unpack(f"<{len(rows)}Q", pack(f"<{len(rows)}Q", *rows)[::-1].translate(_REVERSED_BYTES))
    table = b"".join([row.to_bytes(n_bytes, "little") for row in rows])[::-1].translate(_REVERSED_BYTES)
    return [int.from_bytes(table[i : i + n_bytes], "little") for i in range(0, len(table), n_bytes)]


def _exceeds_recursion(predicted: Sequence[Sequence[str]], referenced: Sequence[Sequence[str]]) -> bool:
    """`exceeds_recursion` of texts already cut."""
    longest = max(map(len, predicted), default=0)
    return any(
        len(words) + len(sentence) > MAX_STEPS and _walk_steps(words, sentence) > MAX_STEPS
        for sentence in referenced
        if len(sentence) + longest > MAX_STEPS
        for words in predicted
    )


def _walk_steps(predicted: Sequence[str], referenced: Sequence[str]) -> int:
    """Steps of the walk back (see `_union_lcs`) for one pair of sentences, until a row or column 0."""
    columns = _columns(predicted)
    row = full = (1 << len(predicted)) - 1
    rows = [row := _next_row(row, columns.get(word, 0), full) for word in referenced]
    steps, j = 0, len(predicted)
    for word, row in zip(reversed(referenced), reversed(rows), strict=True):
        equal = columns.get(word, 0)
        stop = ((equal | ~row) & ((1 << j) - 1)).bit_length()  # column where this row is left, 1-based
        steps += j - stop
        if not stop:
            break
        steps += 1
        j = stop - (equal >> (stop - 1) & 1)
        if not j:
            break
    return steps
