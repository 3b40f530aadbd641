"""Small tokenizers of the kinds that real models have, trained on the packaged haystack, not downloaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eval.needle import HAYSTACK

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE_WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}<|user|>\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEMPLATE_CHATML = (
    "<|im_start|>system\nYou are helpful.<|im_end|>\n{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE_LLAMA2 = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"


def _trained(tokenizer: Tokenizer, special: list[str], alphabet: list[str], vocab_size: int = 2000) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(path) for path in sorted(HAYSTACK.glob("*.txt"))], trainer)
    return tokenizer


def byte_level(
    special: list[str], split: str | None = None, trim_offsets: bool = False, bos: str | None = None
) -> Tokenizer:
    """GPT-2's kind, or Llama 3's with its `split`: a stop and the blank line after it are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    _trained(tokenizer, special, pre_tokenizers.ByteLevel.alphabet())
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos is not None:
        steps.append(_bos_processor(tokenizer, bos))
    tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


def sentence_piece(special: list[str], bos: str) -> Tokenizer:
    """Llama 2's kind: a blank is put before every text, and pieces may cross the end of a sentence."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    _trained(tokenizer, ["<unk>", *special], [chr(code) for code in range(32, 127)])
    tokenizer.post_processor = _bos_processor(tokenizer, bos)
    return tokenizer


def _bos_processor(tokenizer: Tokenizer, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])


TURNS = ["<s>", "</s>", "<|user|>", "<|end|>", "<|assistant|>"]
CHATML = ["<|im_start|>", "<|im_end|>"]

TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    # no template; the tokenizer itself puts a BOS
    "plain": lambda: PreTrainedTokenizerFast(
        tokenizer_object=byte_level(["<s>", "</s>"], bos="<s>"), bos_token="<s>", eos_token="</s>"
    ),
    # no template and no BOS
    "bare": lambda: PreTrainedTokenizerFast(
        tokenizer_object=byte_level(["<s>", "</s>"], trim_offsets=True), bos_token="<s>", eos_token="</s>"
    ),
    # template and tokenizer both put a BOS, and stops swallow blank lines (Llama 3)
    "chat": lambda: PreTrainedTokenizerFast(
        tokenizer_object=byte_level(TURNS, split=LLAMA3_SPLIT, bos="<s>"),
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=TURNS[2:],
        chat_template=TEMPLATE_WITH_BOS,
    ),
    # the same, with offsets that hide the swallowed blanks
    "trimmed": lambda: PreTrainedTokenizerFast(
        tokenizer_object=byte_level(TURNS, split=LLAMA3_SPLIT, trim_offsets=True, bos="<s>"),
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=TURNS[2:],
        chat_template=TEMPLATE_WITH_BOS,
    ),
    # the BOS opens every turn (SmolLM2)
    "chatml": lambda: PreTrainedTokenizerFast(
        tokenizer_object=byte_level(CHATML),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE_CHATML,
    ),
    # SentencePiece (Llama 2)
    "llama2": lambda: PreTrainedTokenizerFast(
        tokenizer_object=sentence_piece(["<s>", "</s>"], bos="<s>"),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE_LLAMA2,
    ),
}
_built: dict[str, PreTrainedTokenizerFast] = {}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a kind in `TOKENIZERS`, built once a session."""
    if kind not in _built:
        _built[kind] = TOKENIZERS[kind]()
    return _built[kind]


@pytest.fixture(params=list(TOKENIZERS))
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Each kind of tokenizer in turn."""
    return tokenizer_of(request.param)


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a BOS and a chat template."""
    return tokenizer_of("chat")


@pytest.fixture
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a BOS and without a chat template."""
    return tokenizer_of("plain")
