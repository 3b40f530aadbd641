"""What a task is to the rest of the project: samples, their token ids, and the scores of an answer.

A task knows texts and metrics, and nothing of models: it is handed a tokenizer and gives back ids. The runner
(`graphkv.grid`) sees tasks only through the three types below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Sample:
    """One prompt with its references.

    Attributes
    ----------
    id
        Unique within the task, stable between runs: half of the key of every record.
    task
        Name of the task that the sample belongs to (`needle`, `hotpotqa`, …): the row or column of a table.
    prompt
        The text as the task builds it, before any cut or chat template.
    references
        Accepted answers; a metric takes the maximum over them. Never empty.
    max_new_tokens
        Longest answer, in tokens of the model at hand.
    meta
        JSON facts stored with each record (`length`, `depth`, `all_classes`, …).
    """

    id: str
    task: str
    prompt: str
    references: tuple[str, ...]
    max_new_tokens: int
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """The token ids of a sample under a protocol, and what the protocol says of its decoding.

    Attributes
    ----------
    ids
        Prompt token ids, special tokens included, as the model reads them.
    n_raw
        Length of the prompt in tokens before the protocol cut it.
    truncated
        Whether it was cut.
    stop_ids
        Every token that ends the answer; None leaves it to the model.
    min_new_tokens
        Stop tokens are forbidden before so many tokens were generated.
    notes
        What the protocol has to say of this prompt, stored with its records; `overflow` is the number of tokens
        by which prompt and answer may exceed the model's positions because the protocol lets them.
    continuation
        Token ids that follow the prompt, for measures that need a given continuation; None: the model writes it.
    """

    ids: tuple[int, ...]
    n_raw: int
    truncated: bool = False
    stop_ids: tuple[int, ...] | None = None
    min_new_tokens: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    continuation: tuple[int, ...] | None = None


class Task(Protocol):
    """A list of samples with a way to encode them and to score an answer.

    Attributes
    ----------
    name
        What a folder of results is called: the task group, with data and protocol where there are several.
    measure
        What is done with each cell: `answer` lets it answer and scores the text; `fidelity` compares it with the
        full cache. They stand in `graphkv.grid`.
    main_score
        The key of `score` that tables and figures show.
    samples
        The samples that were asked for.
    identity
        By name of a task: JSON values that its records depend on beside model, cell and sample id, such as the
        sha256 of the data, the protocol and the versions of the metrics.
    facts
        JSON values for captions: data, protocol, ….
    """

    name: str
    measure: str
    main_score: str
    samples: Sequence[Sample]
    identity: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]

    def encode(self, sample: Sample) -> Encoded:
        """Token ids of `sample`; called once a sample, never for finished ones."""

    def text(self, ids: Sequence[int]) -> str:
        """Text of generated token ids, as scores are made from it."""

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Every score of the answer `text`, by name; never raises on any string."""
