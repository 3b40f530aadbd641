"""Fidelity: how far a cell's next-token distributions are from the full cache's over the same continuation.

No labels: the full cache writes the continuation, or a text is given. It is the most sensitive comparison of
methods for one model, and the cheapest. It measures change, not correctness: a cell that corrects a mistake of the full
cache is charged for it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval import fresh, longbench, needle, protocols
from eval.errors import UserError
from eval.samples import Encoded, Sample, Task

VERSION = 1
"""Of the definitions in `graphkv.fidelity`: a change makes new records."""

SOURCES = ("fresh", "needle", "mini", "longbench", "texts")
_CONTEXT_GAP = "\n\n"


@dataclass(frozen=True)
class FidelityConfig:
    """The fields of `conf/task/fidelity.yaml`.

    Attributes
    ----------
    prompts
        Where prompts come from, out of `SOURCES`.
    max_new_tokens
        Longest continuation in tokens.
    output_error
        Also measure the error of the attention output, by layer: exact, and about as slow as everything else.
    fresh
        `kinds` (see `eval.fresh`), `per_kind`, `seed`, `tokens` of context, `haystack` (null or a folder).
    texts
        `folder` of .txt files, `question` (null: the text goes on), `tokens` of context, and `given`: whether the
        text itself is the continuation.
    needle
        Configuration of that task; its prompts are taken, and its scores are not.
    longbench
        The same, and of each of its tasks the first `per_task` prompts (null: all) of at most `max_tokens` tokens
        (null: any length).
    mini
        `tasks` and `per_task` of the short rows that are made on the spot in LongBench's formats (`eval.mini`).
    """

    name: str = "fidelity"
    prompts: Sequence[str] = ("fresh",)
    max_new_tokens: int = 40
    output_error: bool = False
    fresh: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, Any] = field(default_factory=dict)
    needle: Mapping[str, Any] = field(default_factory=dict)
    longbench: Mapping[str, Any] = field(default_factory=dict)
    mini: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for source in self.prompts:
            if source not in SOURCES:
                raise UserError(f"task fidelity: prompts are {', '.join(SOURCES)}, not {source!r}")
        if not self.prompts:
            raise UserError(f"task fidelity: prompts is empty; name some of {', '.join(SOURCES)}")
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 2:
            raise UserError(f"task fidelity: max_new_tokens must be 2 or more tokens, not {self.max_new_tokens!r}")

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> FidelityConfig:
        """The configuration of a plain dict; unknown keys are refused."""
        allowed = [entry.name for entry in fields(cls)]
        unknown = sorted(set(config) - set(allowed))
        if unknown:
            raise UserError(f"task fidelity: unknown field {', '.join(unknown)}; allowed are {', '.join(allowed)}")
        return cls(**config)


@dataclass(frozen=True)
class FidelityTask:
    """Prompts of several sources; an `eval.samples.Task` whose cells are measured against the full cache.

    Attributes
    ----------
    encoders
        By name of a task of `samples`: how its samples become token ids.
    output_error
        See `FidelityConfig`.
    """

    name: str
    samples: Sequence[Sample]
    identity: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]
    encoders: Mapping[str, Callable[[Sample], Encoded]]
    tokenizer: PreTrainedTokenizerBase
    output_error: bool = False
    main_score: str = "kl"
    measure: str = "fidelity"

    def encode(self, sample: Sample) -> Encoded:
        """Token ids of `sample`, as its source makes them."""
        return self.encoders[sample.task](sample)

    def text(self, ids: Sequence[int]) -> str:
        """Text of generated ids without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Nothing: no text is scored."""
        return {}


def build(
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    protocol: Mapping[str, Any],
    *,
    family: str | None,
    max_positions: int,
    stop_ids: Collection[int],
    limit: int | None,
    partial: bool,
) -> FidelityTask:
    """Collect the prompts; parameters as for `eval.tasks.build`. `limit` counts for each kind of prompt."""
    checked = FidelityConfig.from_mapping(config)
    samples: list[Sample] = []
    identity: dict[str, Any] = {}
    encoders: dict[str, Callable[[Sample], Encoded]] = {}

    def take(found: Sequence[Sample], how: Mapping[str, Any], encode: Callable[[Sample], Encoded]) -> None:
        for sample in found:
            samples.append(replace(sample, max_new_tokens=checked.max_new_tokens))
        for task, facts in how.items():
            encoders[task] = encode
            identity[task] = {
                **facts,
                "fidelity": VERSION,
                "max_new_tokens": checked.max_new_tokens,
                "output_error": checked.output_error,
            }

    for source in checked.prompts:
        if source == "needle":
            inner: Task = needle.build(checked.needle, tokenizer, max_positions, limit)
            take(inner.samples, inner.identity, inner.encode)
        elif source in ("mini", "longbench"):
            profile = protocols.parse(protocol)
            options = {"model_stop_ids": stop_ids, "family": family, "max_positions": max_positions}
            take(*_rows(source, checked, tokenizer, profile, limit, partial, options))
        elif source == "fresh":
            take(*_fresh(checked, tokenizer, limit))
        else:
            take(*_texts(checked, tokenizer, limit))
    facts = {"data": "+".join(checked.prompts), "data_hash": _sha256(identity)}
    return FidelityTask(checked.name, samples, identity, facts, encoders, tokenizer, checked.output_error)


def _rows(
    source: str,
    config: FidelityConfig,
    tokenizer: PreTrainedTokenizerBase,
    profile: protocols.ProtocolProfile,
    limit: int | None,
    partial: bool,
    options: Mapping[str, Any],
):
    """Samples, identity and encoder of LongBench's rows, or of those that are made in their formats."""
    mine = dict(config.longbench)
    max_tokens, per_task = mine.pop("max_tokens", None), mine.pop("per_task", None)
    if source == "mini":
        _only(config.mini, "mini", ("tasks", "per_task"))
        mine |= {"data": "mini", "tasks": config.mini.get("tasks", mine["tasks"])}
        max_tokens, per_task = None, config.mini.get("per_task")
    elif mine["data"] == "mini":
        raise UserError("task fidelity: longbench.data is mini; say task.prompts=[mini] for these")
    for name, value in (("per_task", per_task), ("max_tokens", max_tokens)):
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(
                f"task fidelity: {source}.{name} must be a whole number of at least 1, or null, not {value!r}"
            )
    wanted = min((n for n in (per_task, limit) if n is not None), default=None)
    # With a longest prompt, which rows are the first ones shows when they are read.
    partial = partial or wanted is not None or max_tokens is not None
    inner = longbench.build(mine, tokenizer, profile, **options, partial=partial)
    samples = []
    for task in mine["tasks"]:
        found = 0
        for sample in (sample for sample in inner.samples if sample.task == task):
            if found == wanted:
                break
            if max_tokens is None or inner.encode(sample).n_raw <= max_tokens:
                name = f"{source}-{task}"
                samples.append(replace(sample, task=name, id=f"{source}-{sample.id}"))
                found += 1
        if not found:
            raise UserError(f"task fidelity: {task} has no prompt of at most {max_tokens} tokens")
    identity = {f"{source}-{task}": facts for task, facts in inner.identity.items()}
    return samples, identity, lambda sample: inner.encode(replace(sample, task=sample.task.removeprefix(f"{source}-")))


def _fresh(config: FidelityConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None):
    """Samples, identity and encoder of the prompts that are made on the spot."""
    options = dict(kinds=list(fresh.KINDS), per_kind=8, seed=0, tokens=1200, haystack=None) | dict(config.fresh)
    _only(options, "fresh", ("kinds", "per_kind", "seed", "tokens", "haystack"))
    fresh.check_kinds(options["kinds"])
    prose = needle.read_haystack(options["haystack"])

    def cut(text: str, n: int) -> str:
        ids = tokenizer(text[: 12 * n], add_special_tokens=False)["input_ids"][:n]
        return tokenizer.decode(ids)

    samples, identity = [], {}
    per_kind = min(options["per_kind"], limit or options["per_kind"])
    for kind in options["kinds"]:
        made = [fresh.make(kind, i, options["seed"], prose, cut, options["tokens"]) for i in range(per_kind)]
        task = f"fresh-{kind}"
        for number, prompt in enumerate(made):
            samples.append(
                Sample(
                    id=f"{task}-{options['seed']}-{options['tokens']}-{number}",
                    task=task,
                    prompt=f"{prompt.context}{_CONTEXT_GAP}{prompt.question}",
                    references=(prompt.answer,),
                    max_new_tokens=config.max_new_tokens,
                    meta={"kind": kind, "fact": prompt.fact, "question": prompt.question},
                )
            )
        # A prompt depends on nothing but its number, so records do not depend on how many were made.
        identity[task] = {"texts": _sha256([prose, options["seed"], options["tokens"], _python(kind)])}
    return samples, identity, lambda sample: _chat(tokenizer, sample.prompt)


def _texts(config: FidelityConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None):
    """Samples, identity and encoder of the user's text files."""
    options = dict(folder=None, question=None, tokens=2000, given=False) | dict(config.texts)
    _only(options, "texts", ("folder", "question", "tokens", "given"))
    if options["folder"] is None or not Path(options["folder"]).is_dir():
        raise UserError(f"task fidelity: texts.folder is {options['folder']!r}, but must be a folder of .txt files")
    if options["given"] and options["question"]:
        raise UserError("task fidelity: with texts.given the text goes on, and there can be no texts.question")
    paths = sorted(Path(options["folder"]).rglob("*.txt"))[:limit]
    if not paths:
        raise UserError(f"task fidelity: {options['folder']} has no .txt file")
    tokens, given = options["tokens"], options["given"]
    samples = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        question = f"{_CONTEXT_GAP}{options['question']}" if options["question"] else ""
        samples.append(
            Sample(
                id=f"text-{path.relative_to(options['folder']).as_posix()}-{_sha256(text)[:8]}",
                task="texts",
                prompt=text,
                references=("",),
                max_new_tokens=config.max_new_tokens,
                meta={"kind": "text", "question": question},
            )
        )

    def encode(sample: Sample) -> Encoded:
        ids = tokenizer(sample.prompt)["input_ids"]
        if given:
            end = min(tokens, len(ids) - config.max_new_tokens)
            if end < 1:
                raise UserError(f"{sample.id} has {len(ids)} tokens, too few for a continuation of its own")
            continuation = tuple(ids[end : end + config.max_new_tokens])
            return Encoded(tuple(ids[:end]), len(ids), continuation=continuation)
        if not sample.meta["question"]:
            return Encoded(tuple(ids[:tokens]), len(ids), truncated=len(ids) > tokens)
        cut = tokenizer.decode(tokenizer(sample.prompt, add_special_tokens=False)["input_ids"][:tokens])
        return _chat(tokenizer, cut + sample.meta["question"])

    identity = {"texts": {"question": options["question"], "tokens": tokens, "given": given}}
    return samples, identity, encode


def _chat(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """A user's turn in the tokenizer's chat template, or plain text with a cue where it has none."""
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        ids = ids["input_ids"] if isinstance(ids, Mapping) else ids
    else:
        ids = tokenizer(f"{text}{needle.PLAIN_CUE}")["input_ids"]
    return Encoded(tuple(ids), len(ids))


def _only(options: Mapping[str, Any], where: str, allowed: Sequence[str]) -> None:
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise UserError(f"task fidelity: {where} has no {', '.join(unknown)}; allowed are {', '.join(allowed)}")


def _python(kind: str) -> str | None:
    """The Python version, which the kind `code` is cut from."""
    return platform.python_version() if kind == "code" else None


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
