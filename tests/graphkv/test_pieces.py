"""Texts of tokens: together they are the prompt, whatever a tokenizer does to characters."""

from __future__ import annotations

import pytest

from graphkv.models import byte_tokenizer
from graphkv.pieces import pieces, span

TEXTS = [
    "Tides rise.\n\n\tAnd  fall",
    "Grüße, 中文 😀👩\u200d👧 ﷽",
    "a\ufffdb \u2028 end\ufffd",
    "<|im_start|></script>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_bytes_make_the_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == tokenizer.decode(ids) == f"<s>{text}"


def test_a_character_of_many_tokens_belongs_to_the_last():
    tokenizer = byte_tokenizer()
    assert pieces(tokenizer, tokenizer("a€b", add_special_tokens=False)["input_ids"]) == ["a", "", "", "€", "b"]
    lone = tokenizer("€", add_special_tokens=False)["input_ids"][:2]  # a prompt that was cut within a character
    assert pieces(tokenizer, lone) == ["", "\ufffd"]


def test_pieces_of_a_real_tokenizer_make_the_text(smol, essay):
    text = f"{essay[:500]} Grüße 😀 中文\n\n\n  indented   end"
    ids = smol.tokenizer(text)["input_ids"]
    assert "".join(pieces(smol.tokenizer, ids)) == text


@pytest.mark.parametrize(
    ("passage", "expected"),
    [("bell", (1, 3)), (" the", (0, 1)), ("e bel", (0, 2)), ("l", (1, 2)), ("bells", None), ("", None)],
)
def test_tokens_of_a_passage(passage, expected):
    assert span([" the ", "bel", "l rings"], passage) == expected
