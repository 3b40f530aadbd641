"""Tasks by name: `conf/task/<file>.yaml` has a `name` that stands here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval import needle
from eval.errors import UserError
from eval.samples import Task


def build(
    config: Mapping[str, Any],
    protocol: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    family: str | None,
    max_positions: int,
) -> Task:
    """The task of a configuration.

    Parameters
    ----------
    config
        The resolved `conf/task/*.yaml`.
    protocol
        The resolved `conf/protocol/*.yaml`, for tasks that have one.
    tokenizer
        Of the model that will read the prompts.
    family
        The model's family, which a protocol may treat specially.
    max_positions
        Longest prompt plus answer of the model, in tokens.

    Raises
    ------
    UserError
        For an unknown task, and for whatever the task finds wrong with its settings.
    """
    name = config.get("name")
    if name == "needle":
        return needle.build({k: v for k, v in config.items()}, tokenizer, max_positions)
    raise UserError(f"unknown task {name!r}: choose needle")
