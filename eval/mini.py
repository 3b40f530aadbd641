"""Mini LongBench: rows in the shape of LongBench's 16 tasks, made on the spot. A test bed, not a score.

Nothing is downloaded. The texts are ours, the facts made up, so that no model knows them: an answer comes
from the prompt or not at all. Names, places and things are given out once a row, so a question has one right
answer. Prompts have 500 to 3,000 tokens. The two code tasks are cut from the standard library of the running
Python (`eval.mini_code`), so their rows, and `data_hash`, depend on its version.
"""

from __future__ import annotations

import hashlib
import json
import platform
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from eval import mini_code
from eval import mini_texts as texts
from eval.templates import base

MAX_NEW_TOKENS = 128
"""Longest answer to a mini row in tokens: its summaries are short, and LongBench's 512 would be most of a run."""

ROWS = 20
"""Rows of each task."""

_CODE = ("lcc", "repobench-p")


class _World:
    """Hands out names, places, things and numbers, each once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._left = {pool: rng.sample(words, len(words)) for pool, words in texts.POOLS.items()}
        self._numbers: set[int] = set()

    def __call__(self, pool: str) -> str:
        return self._left[pool].pop()

    def name(self) -> str:
        """First and last name of a person; neither comes twice."""
        return f"{self('first')} {self('last')}"

    def number(self, low: int, high: int) -> int:
        """A number in [low, high] that was not given out before."""
        number = self.rng.randint(low, high)
        while number in self._numbers:
            number = self.rng.randint(low, high)
        self._numbers.add(number)
        return number


def rows(task: str) -> list[dict[str, Any]]:
    """The rows of a task: LongBench's eight fields, the same in every process.

    Raises
    ------
    UserError
        `task` is no LongBench task, or a code task where Python has no sources of its standard library.
    """
    return list(_rows(base(task)))


def data_hash(task: str) -> str:
    """sha256 over the rows of a task; for the code tasks over the Python version too."""
    text = json.dumps(rows(task), sort_keys=True)
    if task in _CODE:
        text += platform.python_version()
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _rows(task: str) -> tuple[dict[str, Any], ...]:
    if task in _CODE:
        cuts = (mini_code.lcc if task == "lcc" else mini_code.repobench)(ROWS)
    else:
        cuts = [_MAKERS[task](_World(random.Random(f"mini {task} {i}")), i) for i in range(ROWS)]
    return tuple(
        {
            "input": question,
            "context": context,
            "answers": answers,
            "length": len(f"{question} {context} {answers[0]}".split()),
            "dataset": task,
            "language": "python" if task in _CODE else "en",
            "all_classes": list(texts.CLASSES) if task == "trec" else None,
            "_id": f"mini-{task}-{i:02}",
        }
        for i, (question, context, answers) in enumerate(cuts)
    )


_Cut = tuple[str, str, list[str]]
"""Input, context, answers."""


# Single documents -------------------------------------------------------------------------------------------


def _narrativeqa(w: _World, i: int) -> _Cut:
    scenes, asked = [], 7 * i % 12
    fillers = [f for _ in range(2) for f in w.rng.sample(texts.FILLERS, len(texts.FILLERS))]
    for number in range(12):
        text, question, answer = texts.SCENES[(number + i) % len(texts.SCENES)]
        facts = {
            "a": w("first"),
            "b": w("first"),
            "place": w("place"),
            "thing": _a(w("object")),
            "n": w.number(11, 99),
        }
        fill = [fillers.pop() for _ in range(2)]
        scenes.append(f"{fill[0]} {text.format(**facts)} {fill[1]}")
        if number == asked:
            asked_question, right_answer = question.format(**facts), answer.format(**facts)
    title = f"THE WINTER AT {w('town').upper()}"
    return asked_question, "\n\n".join([title, *scenes]), [right_answer]


def _qasper(w: _World, i: int) -> _Cut:
    rng = w.rng
    facts = {
        "method": "".join(rng.choice(parts) for parts in texts.METHOD),
        "baseline": rng.choice(texts.BASELINES),
        "language": rng.choice(texts.LANGUAGES),
        "source": rng.choice(texts.SOURCES),
        "sentences": f"{w.number(4, 48)},{w.number(100, 999)}",
        "annotators": w.number(3, 19),
        "layers": w.number(4, 24),
        "epochs": w.number(25, 90),
        "score": f"{w.number(61, 92)}.{rng.randint(1, 9)}",
        "gain": f"{rng.randint(1, 5)}.{rng.randint(1, 9)}",
        "dropout": f"0.{rng.randint(1, 4)}",
        "batch": rng.choice([16, 32, 64, 128]),
    }
    truths, asked = [rng.random() < 0.5 for _ in texts.YES_NO], i // 5 % len(texts.YES_NO)
    truths[asked] = i % 2 == 1
    told = {
        f"claim{number}": yes if truth else no
        for number, (truth, (_, yes, no)) in enumerate(zip(truths, texts.YES_NO, strict=True))
    }
    if i % 5 == 3:
        question, answer = texts.YES_NO[asked][0], "yes" if truths[asked] else "no"
    elif i % 5 == 4:
        question, answer = texts.NOWHERE[(i // 5) % len(texts.NOWHERE)], "unanswerable"
    else:
        question, answer = texts.FACTS[(3 * (i // 5) + i % 5) % len(texts.FACTS)]
    return question.format(**facts), texts.ARTICLE.format(**facts, **told), [answer.format(**facts)]


def _multifieldqa_en(w: _World, i: int) -> _Cut:
    houses = []
    for _ in range(6):
        houses.append(
            {
                "house": f"Museum of {w('collection').title()}",
                "address": f"{w.number(1, 9)} {w('street')}",
                "year": w.number(1801, 1999),
                "founder": w.name(),
                "n": w.number(200, 790),
                "hour": w.rng.choice([8, 9, 10]),
                "closed": w("weekday"),
                "price": w.number(10, 40),
                "piece": _a(w("object")),
                "dish": w("dish"),
                "weeks": w.number(41, 95),
            }
        )
    asked = houses[5 * i % len(houses)]
    question, answer = texts.HOUSE_QUESTIONS[i % len(texts.HOUSE_QUESTIONS)]
    title = f"Small museums of {w('town')}: a guide for visitors"
    text = "\n\n".join(texts.HOUSE.format(**house) for house in houses)
    return question.format(**asked), f"{title}\n\n{text}", [answer.format(**asked)]


# Several documents ------------------------------------------------------------------------------------------


def _person(w: _World) -> dict[str, Any]:
    name = w.name()
    year = w.number(1840, 1960)
    return {
        "name": name,
        "first": name.split()[0],
        "town": w("town"),
        "year": year,
        "later": year + w.rng.randint(22, 31),
        "trade": w("trade"),
        "collection": w("collection"),
        "n": w.number(100, 800),
        "street": w("street"),
    }


def _person_text(person: dict[str, Any]) -> str:
    return texts.PERSON.format(**person, trade_a=_a(person["trade"]))


def _passages(w: _World, passages: list[tuple[str, str]]) -> str:
    """`Passage N:`, a title and a text each, in random order."""
    w.rng.shuffle(passages)
    return "\n\n".join(f"Passage {n}:\n{title}\n{text}" for n, (title, text) in enumerate(passages, 1))


def _companies(w: _World, n: int) -> list[dict[str, Any]]:
    companies = []
    for _ in range(n):
        founder = _person(w)
        company = {
            "company": w("company"),
            "product": w("product"),
            "since": founder["later"] + 4,
            "workers": w.number(801, 990),
        }
        companies.append(founder | company)
    return companies


def _founders(companies: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """A passage about each company and one about its founder."""
    passages = [(c["company"], texts.COMPANY.format(**c)) for c in companies]
    return passages + [(c["name"], _person_text(c)) for c in companies]


def _hotpotqa(w: _World, i: int) -> _Cut:
    companies = _companies(w, 7)
    asked = companies[3 * i % 7]
    question, answer = texts.HOTPOT_QUESTIONS[i % len(texts.HOTPOT_QUESTIONS)]
    return question.format(**asked), _passages(w, _founders(companies)), [str(asked[answer])]


def _2wikimqa(w: _World, i: int) -> _Cut:
    films = [_person(w) | {"film": w("film"), "out": w.number(1961, 2020), "shot": w("town")} for _ in range(6)]
    passages = [(f["film"], texts.FILM.format(**f)) for f in films]
    passages += [(f["name"], _person_text(f)) for f in films]
    lines = [[w.name() for _ in range(3)] for _ in range(3)]
    for third, second, first in lines:
        for pupil, teacher in ((third, second), (second, first)):
            passages.append((pupil, texts.PUPIL.format(pupil=pupil, teacher=teacher)))
    one, two = films[i % 6], films[(i + 1 + i // 6) % 6]
    if i % 3 == 0:
        first = min(one, two, key=lambda film: film["out"])
        question, answer = f"Which film came out first, {one['film']} or {two['film']}?", first["film"]
    elif i % 3 == 1:
        question, answer = f"In which town was the director of {one['film']} born?", one["town"]
    else:
        pupil, _, answer = lines[i // 3 % 3]
        question = f"Who was the teacher of the teacher of {pupil}?"
    return question, _passages(w, passages), [answer]


def _musique(w: _World, i: int) -> _Cut:
    companies = _companies(w, 6)
    passages = _founders(companies)
    for company in companies:
        company |= {
            "river": w("river"),
            "dish": w("dish"),
            "people": w.number(1000, 9999),
            "fair": w("month"),
        }
        passages.append((company["town"], texts.TOWN.format(**company)))
    asked = companies[5 * i % 6]
    question, answer = texts.MUSIQUE_QUESTIONS[i % len(texts.MUSIQUE_QUESTIONS)]
    return question.format(**asked), _passages(w, passages), [asked[answer]]


# Summaries --------------------------------------------------------------------------------------------------


def _gov_report(w: _World, i: int) -> _Cut:
    office = f"Office for {texts.OFFICES[i % len(texts.OFFICES)]}"
    year = 1990 + i
    sections, points = [], []
    for heading, point, detail in w.rng.sample(texts.FINDINGS, 6):
        a = w.number(60, 400)
        facts = {
            "year": year,
            "a": a,
            "b": w.rng.randint(7, a // 3),
            "p": w.number(11, 49),
            "t1": w("town"),
            "t2": w("town"),
        }
        points.append(point.format(**facts))
        sections.append(f"{heading}\n{points[-1]} {detail.format(**facts)}")
    first, second = w.rng.sample(texts.ADVICE, 2)
    advice = f"We recommend that the office {first} and {second}."
    opening = texts.OPENING.format(office=office, year=year)
    context = "\n\n".join([opening, *sections, f"Recommendation\n{advice} The office accepts this advice."])
    summary = [f"The council asked for a review of the {office}.", *points, advice]
    return "", context, [" ".join(summary)]


def _qmsum(w: _World, i: int) -> _Cut:
    roles = ["Project Manager", "Designer", "Engineer", "Marketing"]
    talk = [
        f"{roles[0]}: Okay , is everybody here ? Then let's begin , we have a lot to get through .",
        "Designer: Mm-hmm .",
    ]
    topics = w.rng.sample(texts.TOPICS, 8)
    for number, (topic, options) in enumerate(topics):
        (x, why_x), (y, why_y) = w.rng.sample(options, 2)
        one, two, three = w.rng.sample(roles[1:], 3)
        facts = {"lead": roles[0], "one": one, "two": two, "three": three, "topic": topic}
        facts |= {"x": x, "y": y, "why_x": why_x, "why_y": why_y}
        form = texts.TALK[number % 2]
        talk += [line.format(**facts) for line in form]
        if number == 3 * i % 8:
            proposer = one if form is texts.TALK[0] else two
            query = f"What did the group decide about {topic}, and why?"
            answer = (
                f"{proposer} proposed {x} because {why_x}. {three} preferred {y} because {why_y}. "
                f"The group decided on {y}."
            )
    talk.append(f"{roles[0]}: That's all for today . Thank you , see you next week .")
    return query, "\n".join(talk), [answer]


def _multi_news(w: _World, i: int) -> _Cut:
    facts = {
        "river": w("river"),
        "town": w("town"),
        "weekday": w("weekday"),
        "n": w.number(50, 240),
        "m": w.number(11, 48),
        "year": w.number(1850, 1980),
        "mayor": w.name(),
        "other": w.name(),
        "thing": _a(w("object")),
        "collection": w("collection"),
        "place": w("place"),
    }
    points = [point.format(**facts) for point in texts.EVENTS[i % len(texts.EVENTS)]]
    fillers = w.rng.sample(texts.NEWS_FILLERS, len(texts.NEWS_FILLERS))
    passages = []
    for number, told in enumerate([(0, 1, 2), (0, 3), (0, 4, 1), (0, 2, 3)]):
        body = []
        for point in told:
            body += [points[point], fillers.pop()]
        body += [fillers.pop() for _ in range(3)]
        passages.append(
            f"Passage {number + 1}:\n{w('town')} {w.rng.choice(['Post', 'Courier', 'Echo'])}: {' '.join(body)}"
        )
    return "", "\n\n".join(passages) + "\n", [" ".join(points)]


# Few-shot ---------------------------------------------------------------------------------------------------


def _trec(w: _World, i: int) -> _Cut:
    def ask(kind: str, form: int) -> str:
        places = {"town": w.rng.choice(texts.POOLS["town"]), "river": w.rng.choice(texts.POOLS["river"])}
        names = {"name": f"{w.rng.choice(texts.POOLS['first'])} {w.rng.choice(texts.POOLS['last'])}"}
        things = {pool: w.rng.choice(texts.POOLS[pool]) for pool in ("place", "collection", "trade")}
        thing = _a(w.rng.choice(texts.POOLS["object"]))
        return texts.QUESTIONS[kind][form].format(object=thing, **places, **names, **things)

    examples = [(ask(kind, form), kind) for kind in texts.QUESTIONS for form in (0, 1)]
    w.rng.shuffle(examples)
    kind = sorted(texts.QUESTIONS)[(7 * i) % len(texts.QUESTIONS)]
    question = ask(kind, i % 2)
    while any(question == example for example, _ in examples):
        question = ask(kind, i % 2)
    context = "\n".join(f"Question: {example}\nType: {label}" for example, label in examples)
    return f"Question: {question}\nType:", context, [kind]


def _triviaqa(w: _World, i: int) -> _Cut:
    blocks = []
    for number, facts in enumerate(_companies(w, 7)):
        question, answer = texts.TRIVIA[(i + number) % len(texts.TRIVIA)]
        passage = f"Passage:\n{facts['name']}\n{_person_text(facts)}\n\n{texts.COMPANY.format(**facts)}"
        blocks.append((f"{passage}\nQuestion:\n{question.format(**facts)}\nAnswer:\n", answer.format(**facts)))
    asked, answer = blocks.pop()
    return asked, "".join(f"{block}{solution}\n" for block, solution in blocks), [answer]


def _samsum(w: _World, i: int) -> _Cut:
    blocks = []
    for number in range(11):
        facts = {key: w("first") for key in "abc"}
        facts |= {
            "weekday": w.rng.choice(texts.POOLS["weekday"]),
            "month": w.rng.choice(texts.POOLS["month"]),
            "place": w("place"),
            "thing": _a(w("object")),
            "town": w("town"),
            "trade": _a(w("trade")),
            "dish": w("dish"),
            "n": w.rng.randint(2, 9),
            "m": w.number(15, 95),
        }
        lines, summary = texts.CHATS[(i + number) % len(texts.CHATS)]
        dialogue = "\r\n".join(lines).format(**facts)
        blocks.append((f"Dialogue: {dialogue}\nSummary: ", summary.format(**facts)))
    asked, answer = blocks.pop()
    return asked, "".join(f"{block}{summary}\n" for block, summary in blocks), [answer]


# Synthetic --------------------------------------------------------------------------------------------------


def _passage_count(w: _World, i: int) -> _Cut:
    unique = [_person_text(_person(w)) for _ in range(5 + i % 10)]
    paragraphs = unique + w.rng.choices(unique, k=18 - len(unique))
    w.rng.shuffle(paragraphs)
    context = "\n\n".join(f"Paragraph {n}: {text}" for n, text in enumerate(paragraphs, 1))
    return "", context, [str(len(unique))]


def _passage_retrieval_en(w: _World, i: int) -> _Cut:
    people = [_person(w) for _ in range(30)]
    asked = people[11 * i % 30]
    context = "\n\n".join(f"Paragraph {n}: {_person_text(person)}" for n, person in enumerate(people, 1))
    abstract = (
        f"The text is about {_a(asked['trade'])} from {asked['town']}, who had a workshop and was "
        f"remembered for a large collection of {asked['collection']}."
    )
    return abstract, context, [f"Paragraph {people.index(asked) + 1}"]


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


_MAKERS: dict[str, Callable[[_World, int], _Cut]] = {
    "narrativeqa": _narrativeqa,
    "qasper": _qasper,
    "multifieldqa_en": _multifieldqa_en,
    "hotpotqa": _hotpotqa,
    "2wikimqa": _2wikimqa,
    "musique": _musique,
    "gov_report": _gov_report,
    "qmsum": _qmsum,
    "multi_news": _multi_news,
    "trec": _trec,
    "triviaqa": _triviaqa,
    "samsum": _samsum,
    "passage_count": _passage_count,
    "passage_retrieval_en": _passage_retrieval_en,
}
