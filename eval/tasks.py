"""Tasks by name: `conf/task/<file>.yaml` has a `name` that stands here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval import fidelity, longbench, needle, protocols
from eval.errors import UserError
from eval.samples import Task


def build(
    config: Mapping[str, Any],
    protocol: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    family: str | None,
    max_positions: int,
    stop_ids: Collection[int],
    limit: int | None,
    partial: bool,
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
    stop_ids
        What ends an answer of the model.
    limit
        Leave only the first so many samples, of each task where there are several.
    partial
        Accept data that lacks rows.

    Raises
    ------
    UserError
        For an unknown task, and for whatever the task finds wrong with its settings.
    """
    name = config.get("name")
    if name == "needle":
        return needle.build(config, tokenizer, max_positions, limit)
    if name == "longbench":
        return longbench.build(
            config,
            tokenizer,
            protocols.parse(protocol),
            family,
            max_positions,
            model_stop_ids=stop_ids,
            limit=limit,
            partial=partial,
        )
    if name == "fidelity":
        return fidelity.build(
            config,
            tokenizer,
            protocol,
            family=family,
            max_positions=max_positions,
            stop_ids=stop_ids,
            limit=limit,
            partial=partial,
        )
    raise UserError(f"unknown task {name!r}: choose needle, longbench or fidelity")
