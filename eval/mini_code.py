"""The two code tasks of mini LongBench, cut from the standard library of the running Python.

A line to predict is one whole statement inside a function. Every name in it was seen before, so reading the
prompt helps. Nothing is imported or run: the sources are read and parsed.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from eval.errors import UserError

Cut = tuple[str, str, list[str]]
"""Input, context, answers."""

# Modules of pure Python that have been there for long. One that a later Python drops is passed over.
_MODULES = (
    "argparse bdb calendar cmd code codeop compileall configparser contextlib copy csv dataclasses difflib "
    "dis doctest filecmp fileinput fractions ftplib functools gettext getpass glob graphlib gzip heapq hmac "
    "imaplib inspect ipaddress linecache locale mailbox mimetypes netrc ntpath numbers optparse pdb pickle "
    "pickletools platform plistlib poplib pprint profile pstats pyclbr pydoc queue random reprlib "
    "rlcompleter sched selectors shelve shlex shutil smtplib socketserver statistics subprocess symtable "
    "tabnanny tarfile tempfile textwrap threading timeit tokenize trace traceback turtle typing uuid "
    "warnings weakref zipapp"
).split()
_PACKAGES = (
    "asyncio concurrent/futures email html http importlib/metadata json logging multiprocessing unittest "
    "urllib wsgiref xml/dom xml/sax xmlrpc"
).split()
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.Raise, ast.Delete)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WORD = re.compile(r"[^\W\d]\w*")
_LCC_CHARS = (2_200, 7_500)
"""Least and most characters before the line to predict: 500 to 2,500 tokens."""
_REPOBENCH_CHARS = (600, 4_500)
_SNIPPET_CHARS = 700
_SNIPPETS = 5


def lcc(n: int) -> list[Cut]:
    """`n` rows of lcc: the beginning of a file, and its next line; at most one row a file.

    Raises
    ------
    UserError
        Python has too few sources of its standard library.
    """
    cuts = (cut for name in _MODULES if (cut := _lcc_cut(_source(f"{name}.py"))))
    return _exactly(n, cuts)


def repobench(n: int) -> list[Cut]:
    """`n` rows of repobench-p: snippets of other files, the beginning of a file, and its next line.

    The line uses something that the file imports from a sibling, and that one of the snippets defines.

    Raises
    ------
    UserError
        Python has too few sources of its standard library.
    """
    paths = itertools.zip_longest(*(_paths(package) for package in _PACKAGES))
    cuts = (cut for path in itertools.chain(*paths) if path and (cut := _repobench_cut(path)))
    return _exactly(n, cuts)


def _exactly(n: int, cuts: Iterable[Cut]) -> list[Cut]:
    found = list(itertools.islice(cuts, n))
    if len(found) < n:
        raise UserError(
            f"only {len(found)} of {n} code rows could be cut from {_library()}: task.data=mini needs a "
            "Python with the sources of its standard library, or leave lcc and repobench-p out of task.tasks"
        )
    return found


def _lcc_cut(text: str) -> Cut | None:
    for before, line in _targets(text, *_LCC_CHARS):
        if set(_WORD.findall(line)) <= set(_WORD.findall(before)):
            return "", before, [line]
    return None


def _repobench_cut(path: str) -> Cut | None:
    text, definitions = _source(path), _definitions(path.rpartition("/")[0])
    imports = [node for node in _tree(text).body if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in imports for alias in node.names}
    for before, line in _targets(text, *_REPOBENCH_CHARS):
        words = set(_WORD.findall(line))
        used = [
            name
            for name in sorted(words & definitions.keys())
            if definitions[name][0] != path
            and (name in imported or f"{Path(definitions[name][0]).stem}.{name}" in line)
        ]
        if not used:
            continue
        others = [name for name, (file, _) in definitions.items() if file != path and name not in used]
        step = max(1, len(others) // _SNIPPETS)
        chosen = sorted({*used, *others[::step][: _SNIPPETS - 1]})
        context = "".join("{}\n{}\n".format(*definitions[name]) for name in chosen)
        if words <= set(_WORD.findall(context + before)):
            return before, context, [line]
    return None


def _targets(text: str, low: int, high: int) -> Iterator[tuple[str, str]]:
    """Lines to predict, each with the text before it, which has between `low` and `high` characters.

    In random order; each line is one whole statement inside a function.
    """
    lines = text.split("\n")
    starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
    near = [node for node in _tree(text).body if starts[node.lineno - 1] <= high]
    functions = [node for top in near for node in ast.walk(top) if isinstance(node, _FUNCTIONS)]
    statements = {node.lineno: node for f in functions for node in ast.walk(f) if isinstance(node, _STATEMENTS)}
    numbers = sorted(number for number in statements if low <= starts[number - 1] <= high)
    random.Random(len(text)).shuffle(numbers)
    for number in numbers:
        node, line = statements[number], lines[number - 1]
        alone = node.end_lineno == number and node.col_offset == len(line) - len(line.lstrip(" "))
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        # The metric passes over lines with these marks, so such a line could never be answered.
        unscorable = any(mark in line for mark in ("`", "#", "//", ";"))
        telling = 16 <= len(line.strip()) <= 80 and len(set(_WORD.findall(line))) >= 3
        if alone and telling and not docstring and not unscorable:
            yield text[: starts[number - 1]], line.rstrip()


@cache
def _definitions(package: str) -> dict[str, tuple[str, str]]:
    """Functions and classes that one file of a package defines: name → (path, first lines)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in _paths(package):
        text = _source(path)
        lines = text.split("\n")
        for node in _tree(text).body:
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                taken: list[str] = []
                for line in lines[node.lineno - 1 : node.end_lineno]:
                    if sum(map(len, taken)) + len(line) > _SNIPPET_CHARS:
                        break
                    taken.append(line)
                found.setdefault(node.name, []).append((path, "\n".join(taken)))
    return {name: places[0] for name, places in found.items() if len(places) == 1 and not name.startswith("__")}


@cache
def _library() -> Path:
    spec = importlib.util.find_spec("argparse")
    return Path(spec.origin).parent if spec and spec.origin else Path()


def _paths(package: str) -> list[str]:
    folder = _library() / package
    return sorted(f"{package}/{file.name}" for file in folder.glob("*.py") if not file.name.startswith("__"))


@cache
def _source(path: str) -> str:
    """Text of a file of the standard library, empty if this Python does not have it."""
    file = _library() / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


@cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)
