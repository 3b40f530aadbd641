"""Prompts made on the spot for comparisons without labels: facts of several lengths in prose, prose alone, code.

The facts are invented from a seed, the prose is the packaged haystack or a folder of one's own, and the code is the
standard library of the running Python. A study that fixes its methods first takes a seed that nobody has looked at.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from eval.errors import UserError
from eval.mini_texts import POOLS

_SENTENCE_END = re.compile(r"[.!?][\"'”’)]*(?=\s+[A-Z])")
_MODULES = "argparse bisect calendar configparser csv difflib fractions heapq shlex statistics string textwrap".split()
_CODE_ASKS = (
    "Explain in a few sentences what this code does.",
    "Write the next function of this file.",
    "List the functions that are defined above and say what each returns.",
)
_PROSE_ASKS = (
    "Summarise the text above in three sentences.",
    "What is the main subject of the text above, and what does the author say about it?",
    "Which advice could a reader take from the text above?",
    "Name two facts that the text above mentions.",
)


@dataclass(frozen=True)
class Fresh:
    """One prompt as texts.

    Attributes
    ----------
    context
        What is read: prose with or without a fact in it, or code.
    question
        What is asked about it.
    fact
        The invented evidence, "" where there is none.
    answer
        The part of the fact that is asked for, "" where there is none.
    """

    context: str
    question: str
    fact: str = ""
    answer: str = ""


class _Names:
    """Draws words of `POOLS`, none twice."""

    def __init__(self, rng: random.Random) -> None:
        self._left = {pool: rng.sample(words, len(words)) for pool, words in POOLS.items()}

    def __getitem__(self, pool: str) -> str:
        return self._left[pool].pop()


def _word(rng: random.Random, names: _Names) -> tuple[str, str, str]:
    town, answer = names["town"], names["last"]
    return f"The ferryman of {town} is called {answer}.", f"What is the ferryman of {town} called?", answer


def _number(rng: random.Random, names: _Names) -> tuple[str, str, str]:
    town, answer = names["town"], str(rng.randint(1_000_000, 9_999_999))
    return (
        f"The register number of the bell of {town} is {answer}.",
        f"What is the number of the bell of {town}?",
        answer,
    )


def _sentence(rng: random.Random, names: _Names) -> tuple[str, str, str]:
    town, person = names["town"], f"{names['first']} {names['last']}"
    answer = f"a lantern of green glass, two jars of salted plums and a map of the river {names['river']}"
    return f"In the cellar of {town} the baker {person} keeps {answer}.", f"What does the baker of {town} keep?", answer


def _passage(rng: random.Random, names: _Names) -> tuple[str, str, str]:
    town, first, last = names["town"], names["first"], names["last"]
    answer = (
        f"On the first day {first} {last} carries the old clock of {town} down to the river {names['river']}. "
        f"On the second day {names['first']} the cooper fills its case with sand and closes it with wax. "
        f"On the third day the whole village rows it out to {names['town']} and sinks it beside the northern pier."
    )
    return answer, f"What happens to the clock of {town}? Tell it day by day.", answer


FACTS: dict[str, Callable[[random.Random, _Names], tuple[str, str, str]]] = {
    "word": _word,
    "number": _number,
    "sentence": _sentence,
    "passage": _passage,
}
KINDS = (*FACTS, "prose", "code")


def make(kind: str, number: int, seed: int, prose: str, cut: Callable[[str, int], str], tokens: int) -> Fresh:
    """The prompt of that kind and number.

    Parameters
    ----------
    kind
        One of `KINDS`.
    number, seed
        Name the prompt: the same ones give the same prompt.
    prose
        Text to cut from.
    cut
        `cut(text, n)` is the beginning of a text, `n` tokens of the model long.
    tokens
        Length of the context.
    """
    rng = random.Random(f"{seed} {kind} {number}")
    if kind == "code":
        text = _code(rng, number)
        return Fresh(cut(text, tokens), rng.choice(_CODE_ASKS))
    start = rng.choice(_starts(prose))
    text = cut(prose[start:] + "\n\n" + prose[:start], tokens)
    if kind == "prose":
        return Fresh(text, rng.choice(_PROSE_ASKS))
    fact, question, answer = FACTS[kind](rng, _Names(rng))
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    if not ends:
        raise UserError(f"task fidelity: {tokens} tokens of the haystack hold no end of a sentence to put a fact after")
    depth = rng.uniform(0.05, 0.95) * len(text)
    place = min(ends, key=lambda end: abs(end - depth))
    return Fresh(f"{text[:place]} {fact}{text[place:]}", question, fact, answer)


@lru_cache(maxsize=1)  # a haystack of megabytes serves all prompts
def _starts(prose: str) -> list[int]:
    return [match.end() + 1 for match in _SENTENCE_END.finditer(prose)]


def _code(rng: random.Random, number: int) -> str:
    """Source of a module, from one of its functions or classes on; modules take turns."""
    source = _module(_MODULES[number % len(_MODULES)])
    starts = [match.start() for match in re.finditer(r"^(?:def|class) ", source, re.MULTILINE)]
    return source[rng.choice(starts[: max(1, len(starts) // 2)]) :]


@cache
def _module(name: str) -> str:
    path = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"task fidelity: {path} cannot be read ({error.strerror}): leave out the kind code") from None


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse a kind that is unknown or named twice."""
    for kind in kinds:
        if kind not in KINDS or list(kinds).count(kind) > 1:
            raise UserError(f"task fidelity: fresh.kinds are {', '.join(KINDS)}, each once, not {kind!r}")
