"""A file and a question as the only sample of a task: for looking at one's own text, with nothing to score."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.errors import UserError
from eval.samples import Encoded, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextTask:
    """One prompt made of a text and a question about it; a `Task` of `eval.samples`.

    With a question the prompt is "<text>, blank line, Question: <question>" within the tokenizer's chat template, or
    followed by "Answer:" if it has none. Without one the text is the prompt as it stands, for the model to go on with.

    Parameters
    ----------
    file
        UTF-8 text.
    question
        None for the text alone.
    tokenizer
        Of the model that will read the prompt.
    max_new_tokens
        Longest answer in tokens.

    Raises
    ------
    UserError
        If the file cannot be read, is not UTF-8, or is empty.
    """

    name = "text"
    measure = "answer"
    main_score = ""

    def __init__(
        self, file: Path, question: str | None, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
    ) -> None:
        text = read(file, f"the text {str(file)!r}")
        self._tokenizer = tokenizer
        self._templated = question is not None and bool(tokenizer.chat_template)
        if question is not None:
            text = f"{text}\n\nQuestion: {question}"
            if not self._templated:
                text = f"{text}\nAnswer:"
        if self._templated:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        meta = {"file": file.name, "question": question}
        self.samples: Sequence[Sample] = [Sample(file.stem, self.name, text, (), max_new_tokens, meta)]
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.identity = {self.name: {"data": sha256, "max_new_tokens": max_new_tokens}}
        self.facts: dict[str, Any] = {"data_hash": sha256}

    def encode(self, sample: Sample) -> Encoded:
        """Token ids of the prompt; a chat template writes the special tokens itself."""
        ids = self._tokenizer(sample.prompt, add_special_tokens=not self._templated)["input_ids"]
        return Encoded(ids=tuple(ids), n_raw=len(ids))

    def text(self, ids: Sequence[int]) -> str:
        """Text of generated ids without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Nothing: there is no right answer to compare with."""
        return {}


def read(file: Path, name: str) -> str:
    """The text of a UTF-8 file, stripped; what is wrong with it is a UserError that begins with `name`."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start})") from None
    if not text:
        raise UserError(f"{name} is empty")
    return text
