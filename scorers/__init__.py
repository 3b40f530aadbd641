"""Scorers, one file each: `scorers.get("snapkv")` is the class in `scorers/snapkv.py`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from scorers.base import ALL_QUERIES, LayerView, Needs, Rope, Scorer

__all__ = ["ALL_QUERIES", "LayerView", "Needs", "Rope", "Scorer", "get", "names"]


def names() -> list[str]:
    """Names of all scorers: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def get(name: str) -> type[Scorer]:
    """The scorer class that `scorers/<name>.py` defines.

    Raises
    ------
    ValueError
        If there is no such file; the message lists the names.
    """
    if name not in names():
        raise ValueError(f"unknown scorer {name!r}: choose one of {', '.join(names())}")
    module = importlib.import_module(f"scorers.{name}")
    (found,) = (
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Scorer) and member.__module__ == module.__name__
    )
    return found
