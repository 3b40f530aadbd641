"""Edit similarity of code, with either of fuzzywuzzy's two back ends.

fuzzywuzzy computes `difflib`'s ratio where python-Levenshtein is not installed and the Indel similarity where
it is. The code tasks differ by 1 to 3 points between them, so nothing here has a default back end.
"""

from __future__ import annotations

import difflib
import warnings
from typing import Literal, get_args

from rapidfuzz.distance import Indel

from eval.errors import UserError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # "Using slow pure-python SequenceMatcher": which one is said below
    from fuzzywuzzy import fuzz

Similarity = Literal["difflib", "levenshtein"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)

# The back end of the installed fuzzywuzzy; the other one is computed here by the same rules.
INSTALLED: Similarity = "difflib" if fuzz.SequenceMatcher is difflib.SequenceMatcher else "levenshtein"

_COMMENT_MARKS = ("`", "#", "//")


def fuzz_ratio(a: str, b: str, similarity: Similarity) -> int:
    """Similarity of two strings in whole percent, as `fuzzywuzzy.fuzz.ratio`.

    Equal strings (empty ones too) give 100, else an empty one gives 0, else 100·r is rounded, halves to even.

    Parameters
    ----------
    a, b
        The strings, unstripped. The order matters to `difflib`: LongBench passes the prediction first.
    similarity
        "difflib": r = 2M/(len a + len b), M the characters in `difflib`'s matching blocks.
        "levenshtein": r = 1 - (insertions + deletions)/(len a + len b), the fewest that make b of a.

    Raises
    ------
    UserError
        Where `similarity` is no back end.

    Notes
    -----
    fuzzywuzzy 0.18.0, python-Levenshtein 0.27.5, rapidfuzz 3.14.6.
    """
    if similarity not in SIMILARITIES:
        raise UserError(f"similarity {similarity!r} is not one of {', '.join(SIMILARITIES)}")
    if similarity == INSTALLED:
        return fuzz.ratio(a, b)
    if a == b:
        return 100
    if not a or not b:
        return 0
    r = difflib.SequenceMatcher(None, a, b).ratio() if similarity == "difflib" else Indel.normalized_similarity(a, b)
    return round(100 * r)


def code_line(prediction: str, skip_blank: bool = False) -> str:
    """The line of a completion that is scored: the first without "`", "#" or "//", "" if there is none.

    Leading newlines are removed, no other white space. Officially a blank line counts as the answer;
    `skip_blank` passes over it, as lm-evaluation-harness does since version 6 of its LongBench tasks.
    """
    for line in prediction.lstrip("\n").split("\n"):
        if not any(mark in line for mark in _COMMENT_MARKS) and (line.strip() or not skip_blank):
            return line
    return ""
