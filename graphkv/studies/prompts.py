"""The prompt that a study reads: the packaged essays with a needle in them, or a text of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path

from eval import needle
from eval.errors import UserError
from eval.text import read as read_text
from graphkv.config import CellSettings
from graphkv.engine import Engine
from graphkv.models import ModelInfo
from graphkv.prefill import Prefill

_ANSWER = 32  # tokens of the full cache's answer, for scorers that look at it


@dataclass(frozen=True)
class TextOptions:
    """Which text a study reads.

    Parameters
    ----------
    text
        A UTF-8 file; None takes the packaged essays.
    question
        What is asked after the text. None: about a needle in the middle of the essays, and nothing of a file.
    """

    text: str | None = None
    question: str | None = None

    def ids(self, info: ModelInfo, tokens: int, answer: int = 1) -> tuple[int, ...]:
        """Prompt token ids, with the model's chat template if it has one.

        Parameters
        ----------
        info
            The model, for its tokenizer and its positions.
        tokens
            Length of the prompt, template and question included: exact with the needle; else the text is cut to it,
            give or take a token, and a text that is too short gives a shorter prompt.
        answer
            Tokens of the longest answer to come, which must fit in as well.

        Raises
        ------
        UserError
            If the file cannot be read, or if `tokens` are too few for the question or too many for the model.
        """
        if tokens + answer > info.max_positions:
            raise UserError(
                f"study: a prompt of {tokens} tokens and an answer of {answer} exceed the {info.max_positions} "
                f"positions of {info.label}"
            )
        if self.text is None and self.question is None:
            task = needle.build({"lengths": [tokens], "depths": [50]}, info.tokenizer)
            return task.encode(task.samples[0]).ids
        text = needle.read_haystack() if self.text is None else read_text(Path(self.text), f"study.text={self.text}")
        return _cut(info.tokenizer, text, self.question, tokens)


@dataclass(frozen=True)
class PromptOptions(TextOptions):
    """Which prompt a study reads.

    Parameters
    ----------
    tokens
        Length of the prompt; see `TextOptions.ids`.
    """

    tokens: int = 1000

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"tokens must be 2 or more, not {self.tokens}")


def read(engine: Engine, ids: Sequence[int], cells: Sequence[CellSettings], chunk: int | None = None) -> Prefill:
    """Prefill `ids` with everything that `cells` need, `chunk` tokens at a time (None: all at once)."""
    needs = reduce(or_, (cell.needs for cell in cells))
    prefill = engine.prefill(ids, window=0, needs=needs, chunk=chunk)
    return engine.look_ahead(prefill, _ANSWER) if needs.answer else prefill


def _cut(tokenizer, text: str, question: str | None, tokens: int) -> tuple[int, ...]:
    """The ids of a prompt whose text is cut, at the end of a token, to what fits."""
    room = tokens - len(_wrapped(tokenizer, "", question))
    if room < 1:
        raise UserError(f"study.tokens={tokens} leaves no room for a text beside template and question")
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).offset_mapping
    return _wrapped(tokenizer, text if len(ends) <= room else text[: ends[room - 1][1]], question)


def _wrapped(tokenizer, text: str, question: str | None) -> tuple[int, ...]:
    content = text if question is None else f"{text}\n\nQuestion: {question}"
    if tokenizer.chat_template:
        content = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return tuple(tokenizer(content, add_special_tokens=False).input_ids)
    return tuple(tokenizer(content if question is None else content + needle.PLAIN_CUE).input_ids)
