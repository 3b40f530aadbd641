"""A file and a question as a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.errors import UserError
from eval.text import TextTask
from graphkv.models import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "bells.txt"
    path.write_text("\n  The bell rings at nine.\n\n", encoding="utf-8")
    return path


def prompt(file: Path, question: str | None, template: str | None = None) -> str:
    """The text of the prompt's tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    task = TextTask(file, question, tokenizer, 8)
    (sample,) = task.samples
    encoded = task.encode(sample)
    assert encoded.n_raw == len(encoded.ids) and sample.max_new_tokens == 8 and sample.id == "bells"
    return tokenizer.decode(encoded.ids)


def test_a_text_alone_is_the_prompt(file):
    assert prompt(file, None) == prompt(file, None, TEMPLATE) == "<s>The bell rings at nine."


def test_a_question_follows_the_text(file):
    assert prompt(file, "When?") == "<s>The bell rings at nine.\n\nQuestion: When?\nAnswer:"


def test_a_chat_template_writes_the_first_token_itself(file):
    assert prompt(file, "When?", TEMPLATE) == "<s>[user] The bell rings at nine.\n\nQuestion: When?[me]"


def test_answers_have_text_and_no_score(file):
    task = TextTask(file, None, byte_tokenizer(), 8)
    assert task.text([110, 105, 110, 101, 257]) == byte_tokenizer().decode([110, 105, 110, 101])
    assert task.score(task.samples[0], "nine") == {}


def test_different_prompts_have_different_identities(file):
    hashes = {TextTask(file, question, byte_tokenizer(), 8).facts["data_hash"] for question in (None, "When?", "Why?")}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), (b" \n", "is empty"), (b"\xff", r"not UTF-8 \(byte 0\)")]
)
def test_unusable_files_are_one_sentence(tmp_path, content, says):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        TextTask(path, None, byte_tokenizer(), 8)
