"""What a study reads: exact length with the needle, a text of one's own, and what cannot be read."""

from __future__ import annotations

import pytest

from eval.errors import UserError
from eval.needles import NEEDLES
from graphkv.studies.prompts import PromptOptions, TextOptions


def text_of(engine, ids) -> str:
    return engine.tokenizer.decode(ids)


def test_the_default_is_the_needle_at_exact_length(tiny):
    ids = TextOptions().ids(tiny.info, 700)
    assert len(ids) == 700
    assert text_of(tiny, ids).count(NEEDLES["dolores"].text) == 1
    assert NEEDLES["dolores"].question in text_of(tiny, ids)


def test_a_question_about_the_essays(tiny):
    ids = TextOptions(question="What floats?").ids(tiny.info, 500)
    assert len(ids) == 500
    assert text_of(tiny, ids).endswith("\n\nQuestion: What floats?\nAnswer:")
    assert NEEDLES["dolores"].text not in text_of(tiny, ids)


def test_a_file_is_cut_to_the_length(tiny, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("Gulls and boats. " * 100, encoding="utf-8")
    ids = TextOptions(text=str(file), question="Who?").ids(tiny.info, 120)
    assert len(ids) == 120
    assert text_of(tiny, ids).startswith("<s>Gulls and boats.") and text_of(tiny, ids).endswith(
        "Question: Who?\nAnswer:"
    )
    file.write_text("Short.", encoding="utf-8")
    assert text_of(tiny, TextOptions(text=str(file)).ids(tiny.info, 120)) == "<s>Short."


def test_a_chat_template_wraps_it(smol, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text("The tide rises and falls. " * 100, encoding="utf-8")
    ids = TextOptions(text=str(file), question="What rises?").ids(smol.info, 200)
    assert abs(len(ids) - 200) <= 1
    assert text_of(smol, ids).endswith("Question: What rises?<|im_end|>\n<|im_start|>assistant\n")
    assert text_of(smol, ids).count("<|im_start|>user") == 1


@pytest.mark.parametrize(
    ("content", "tokens", "message"),
    [
        (None, 100, "cannot be read: No such file"),
        (b"\xff\xfe", 100, r"is not UTF-8 \(byte 0\)"),
        (b" \n", 100, "is empty"),
        (b"words", 20, "study.tokens=20 leaves no room"),
        (b"words", 4090, "a prompt of 4090 tokens and an answer of 32 exceed the 4096 positions of tiny"),
    ],
)
def test_user_errors(tiny, tmp_path, content, tokens, message):
    file = tmp_path / "own.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        TextOptions(text=str(file), question="What is it?").ids(tiny.info, tokens, answer=32)


def test_a_prompt_has_tokens():
    with pytest.raises(ValueError, match="tokens must be 2 or more"):
        PromptOptions(tokens=1)
