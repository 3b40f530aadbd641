"""Cut, chat format, BOS, stops: what each protocol does to a prompt."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eval import protocols
from eval.errors import UserError
from eval.metrics import LONGBENCH
from eval.samples import Sample

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("official", "paper", "pyramidkv2026")
EXEMPT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")

# As Llama-3's: the template writes BOS, and the tokenizer would write another one.
TURNS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)
# As SmolLM2's: the token that opens every turn is BOS, and the tokenizer writes none.
CHATML_TEMPLATE = (
    "<|im_start|>system\nBe brief.<|im_end|>\n{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy(
    special: list[str],
    *,
    adds_bos: bool = True,
    template: str | None = None,
    corpus: list[str] | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer.

    Parameters
    ----------
    special
        Special tokens: BOS, EOS, then any others.
    adds_bos
        Whether it puts BOS before a text.
    template
        Chat template.
    corpus
        Texts to train merges on; None: one id a byte.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=corpus is not None)
    core.decoder = decoders.ByteLevel()
    if corpus is not None:
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
        core.train_from_iterator(corpus, trainer)
    core.add_special_tokens(special)
    bos, eos = special[:2]
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, chat_template=template)


TURNS = toy(["<s>", "<|end_of_text|>", "<|eot_id|>", "<|user|>", "<|end|>", "<|model|>"], template=TURNS_TEMPLATE)
CHATML = toy(["<|im_start|>", "<|im_end|>"], adds_bos=False, template=CHATML_TEMPLATE)
PLAIN = toy(["<s>", "</s>"])
BARE = toy(["<s>", "</s>"], adds_bos=False)


def facts(name: str) -> dict:
    """The keys and values of a protocol file."""
    return yaml.safe_load((ROOT / f"conf/protocol/{name}.yaml").read_text(encoding="utf-8"))


OFFICIAL, PAPER, PYRAMIDKV = (protocols.parse(facts(name)) for name in NAMES)


def sample(prompt: str, task: str = "hotpotqa", max_new_tokens: int = 32) -> Sample:
    return Sample("id", task, prompt, ("answer",), max_new_tokens)


def text(encoded, tokenizer) -> str:
    return tokenizer.decode(encoded.ids, skip_special_tokens=False)


# Files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_files_parse_and_bear_their_name(name):
    profile = protocols.parse(facts(name))
    assert profile.name == name
    assert protocols.parse(OmegaConf.create(facts(name))) == profile


def test_every_file_is_tested():
    assert {path.stem for path in (ROOT / "conf/protocol").glob("*.yaml")} == set(NAMES)


def test_cut_lengths():
    assert OFFICIAL.cut == {"llama2": 3500}
    assert PAPER.cut == {"llama2": 3950, "llama3": 7950, "mistral": 31500, "qwen": 15500}
    assert PYRAMIDKV.cut == {"llama2": 3950, "llama3": 7500, "mistral": 31500}


def test_similarity_back_ends():
    assert [p.similarity for p in (OFFICIAL, PAPER, PYRAMIDKV)] == ["difflib", "levenshtein", "levenshtein"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"maxlen": 3}, "unknown key 'maxlen', allowed are name, cut"),
        ({"cut": None}, "cut is None"),
        ({"cut": {"llama2": "3500"}}, "cut is"),
        ({"cut": {"llama2": True}}, "cut is"),
        ({"cut": {"llama2": 1}}, "cut.llama2 is 1, the least allowed is 2"),
        ({"min_new_tokens": {"otherwise": -1}}, "min_new_tokens.otherwise is -1"),
        ({"min_new_tokens": {"samsum": 1}}, "min_new_tokens has no entry 'otherwise'"),
        ({"chat": {"llama2": "none"}}, "chat has no entry 'otherwise'"),
        ({"chat": {"otherwise": "template"}}, "allowed are none, model, or a text with {prompt} once"),
        ({"chat": {"otherwise": "{prompt}{prompt}"}}, "allowed are none, model, or a text"),
        ({"order": "during"}, "order is 'during', allowed are after, before"),
        ({"overflow": "crash"}, "overflow is 'crash', allowed are fit, extend"),
        ({"stop": "both"}, "stop is 'both', allowed are model, eos"),
        ({"similarity": "rapidfuzz"}, "similarity is 'rapidfuzz', allowed are difflib, levenshtein"),
        ({"exempt": ["trek"]}, "exempt names 'trek', allowed are narrativeqa"),
        ({"exempt": "trec"}, "exempt is 'trec'"),
        ({"exempt": ["otherwise"]}, "exempt names 'otherwise'"),
        ({"stop_texts": {"samsun": "\n"}}, "stop_texts names 'samsun'"),
        ({"stop_tokens": [3]}, "stop_tokens is"),
        ({"name": None}, "name is None"),
    ],
)
def test_bad_files(change, message):
    with pytest.raises(UserError) as error:
        protocols.parse(facts("official") | change)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("key", facts("official"))
def test_missing_key(key):
    with pytest.raises(UserError, match=f"the key '{key}' is missing"):
        protocols.parse({k: v for k, v in facts("official").items() if k != key})


# The cut ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "kept"), [(6, "012789"), (7, "012789"), (9, "01236789"), (10, "0123456789")])
def test_the_middle_goes(cut, kept):
    """Case P1: 10 tokens cut at 6 leave [0,1,2,7,8,9]; an odd cut loses one."""
    profile = replace(PAPER, cut={"family": cut})
    encoded = protocols.encode(sample("0123456789"), BARE, profile, "family", 4096)
    assert text(encoded, BARE) == kept
    assert (encoded.n_raw, encoded.truncated) == (10, cut < 10)


def test_bos_counts_and_comes_back():
    """The first half is BOS and two bytes; BOS goes in decoding and comes back: six tokens again."""
    profile = replace(PAPER, cut={"family": 6})
    encoded = protocols.encode(sample("0123456789"), PLAIN, profile, "family", 4096)
    assert text(encoded, PLAIN) == "<s>01789"
    assert (encoded.n_raw, len(encoded.ids), encoded.truncated) == (11, 6, True)


def test_retokenised_halves_may_differ_from_the_cut():
    """Case P14: encode is not the inverse of decode, so the length is stored and not assumed."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abc", k=rng.randint(2, 9))) for _ in range(400)]
    tokenizer = toy(["<s>", "</s>"], corpus=words)
    prompt = " ".join(words)
    raw = tokenizer(prompt).input_ids
    differences = set()
    for cut in range(40, 80, 2):
        profile = replace(PAPER, cut={"family": cut})
        encoded = protocols.encode(sample(prompt), tokenizer, profile, "family", 4096)
        halves = [tokenizer.decode(part, skip_special_tokens=True) for part in (raw[: cut // 2], raw[-cut // 2 :])]
        assert list(encoded.ids) == tokenizer("".join(halves)).input_ids
        assert encoded.n_raw == len(raw) and encoded.truncated
        differences.add(len(encoded.ids) - cut)
    assert len(differences) > 1 and max(map(abs, differences)) <= 4


@pytest.mark.parametrize(("order", "expected", "n_raw"), [("after", "<s>[089]", 11), ("before", "<s>[9]", 13)])
def test_the_chat_format_comes_after_or_before_the_cut(order, expected, n_raw):
    profile = replace(OFFICIAL, cut={"family": 5}, chat={"otherwise": "[{prompt}]"}, order=order)
    encoded = protocols.encode(sample("0123456789"), PLAIN, profile, "family", 4096)
    assert text(encoded, PLAIN) == expected
    assert encoded.n_raw == n_raw and encoded.notes["chat"] == "protocol"


def test_question_at_the_end_survives():
    """Case P11: the whole prompt is cut and read; nothing is put after it but the chat format."""
    prompt = "Instruction. " + "x" * 9000 + " Question: who?\nAnswer:"
    for profile, tokenizer in ((OFFICIAL, TURNS), (PAPER, TURNS), (OFFICIAL, CHATML), (PYRAMIDKV, PLAIN)):
        encoded = protocols.encode(sample(prompt), tokenizer, profile, "llama3", 4096)
        shown = text(encoded, tokenizer)
        assert "Instruction. x" in shown and "x Question: who?\nAnswer:" in shown and encoded.truncated
        assert len(shown) - shown.index("Answer:") < 100


# Chat formats and BOS ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [TURNS, PLAIN], ids=["turns", "plain"])
@pytest.mark.parametrize("chat", ["none", "model", "[INST]{prompt}[/INST]", "<s>[INST] {prompt} [/INST]"])
@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("length", [10, 500])
def test_exactly_one_bos(tokenizer, chat, order, length):
    profile = replace(OFFICIAL, chat={"otherwise": chat}, order=order, cut={"family": 100})
    encoded = protocols.encode(sample("x" * length), tokenizer, profile, "family", 4096)
    assert encoded.ids[0] == tokenizer.bos_token_id
    assert encoded.ids.count(tokenizer.bos_token_id) == 1


def test_no_bos_where_the_tokenizer_has_none():
    encoded = protocols.encode(sample("x"), BARE, OFFICIAL, "family", 4096)
    assert text(encoded, BARE) == "x"


def test_bos_that_opens_every_turn_is_not_doubled():
    encoded = protocols.encode(sample("hello"), CHATML, OFFICIAL, "smollm2", 4096)
    assert text(encoded, CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encoded.notes["chat"] == "model"


def test_official_llama2():
    encoded = protocols.encode(sample("hello"), PLAIN, OFFICIAL, "llama2", 4096)
    assert text(encoded, PLAIN) == "<s>[INST]hello[/INST]"
    assert encoded.notes == {"cut": 3500, "cut_from": "protocol", "chat": "protocol", "overflow": 0}


def test_pyramidkv2026_llama3():
    tokens = ["<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = toy(tokens, template=TURNS_TEMPLATE)
    encoded = protocols.encode(sample("hello"), tokenizer, PYRAMIDKV, "llama3", 8192)
    assert text(encoded, tokenizer) == (
        "<s><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("family", ["llama2", "llama3", "mistral", "qwen", "smollm2", None])
def test_paper_has_no_chat_format(family):
    """Cases P3, P6: the script's wrapper needs a path that the paper's hub names do not have."""
    encoded = protocols.encode(sample("hello"), TURNS, PAPER, family, 32768)
    assert text(encoded, TURNS) == "<s>hello" and encoded.notes["chat"] == "none"


def test_official_and_paper_differ_for_llama3():
    """Case P3."""
    official, paper = (protocols.encode(sample("hello"), TURNS, p, "llama3", 8192) for p in (OFFICIAL, PAPER))
    assert text(official, TURNS) == "<s><|user|>hello<|end|><|model|>" != text(paper, TURNS)


def test_templated_tasks():
    """Case P4: 11 of the 16."""
    assert OFFICIAL.exempt == PYRAMIDKV.exempt == EXEMPT and PAPER.exempt == ()
    templated = [
        task
        for task in LONGBENCH
        if "[INST]" in text(protocols.encode(sample("x", task), PLAIN, OFFICIAL, "llama2", 4096), PLAIN)
    ]
    assert templated == [task for task in LONGBENCH if task not in EXEMPT] and len(templated) == 11


@pytest.mark.parametrize("task", ["trec_e", "lcc_e", "samsum_e"])
def test_e_tasks_are_exempt_too(task):
    assert OFFICIAL.chat_format(task, "llama2") == "none"


def test_model_without_chat_template():
    encoded = protocols.encode(sample("hello"), PLAIN, OFFICIAL, "base", 4096)
    assert text(encoded, PLAIN) == "<s>hello" and encoded.notes["chat"] == "none"


# Positions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task", ["hotpotqa", "gov_report", "samsum"])
def test_the_embedded_model_fits_under_every_protocol(name, task):
    new = {"hotpotqa": 32, "gov_report": 512, "samsum": 128}[task]
    profile = protocols.parse(facts(name))
    encoded = protocols.encode(sample("x" * 20_000, task, new), CHATML, profile, "smollm2", 8192)
    assert 8190 <= len(encoded.ids) + new <= 8192
    assert encoded.notes["cut_from"] == "positions" and encoded.notes["overflow"] == 0 and encoded.truncated


def test_an_unlisted_family_that_fits_is_not_cut():
    encoded = protocols.encode(sample("x" * 3000), CHATML, OFFICIAL, None, 8192)
    assert not encoded.truncated and encoded.notes["cut_from"] == "positions" and encoded.notes["cut"] == 8192 - 32


def test_the_chat_format_alone_may_force_a_cut():
    """The prompt fits, the prompt in its chat format does not."""
    encoded = protocols.encode(sample("x" * 160), CHATML, OFFICIAL, None, 200)
    assert encoded.truncated and 199 <= len(encoded.ids) + 32 <= 200 and encoded.notes["cut"] < 160


@pytest.mark.parametrize(
    ("profile", "family", "positions", "overflow"),
    [(PAPER, "llama3", 8192, 270), (PAPER, "llama2", 4096, 366), (PYRAMIDKV, "llama2", 4096, 366)],
)
def test_published_overflow_is_kept_and_noted(profile, family, positions, overflow):
    task = sample("x" * 20_000, "gov_report", 512)
    encoded = protocols.encode(task, PLAIN, profile, family, positions)
    assert len(encoded.ids) == profile.cut[family]
    assert encoded.notes["overflow"] == overflow and encoded.notes["cut_from"] == "protocol"


@pytest.mark.parametrize(
    ("profile", "family", "positions"),
    [(OFFICIAL, "llama2", 4096), (PYRAMIDKV, "llama3", 8192), (PAPER, "mistral", 32768)],
)
def test_the_other_published_cuts_leave_room(profile, family, positions):
    encoded = protocols.encode(sample("x" * 40_000, "gov_report", 512), PLAIN, profile, family, positions)
    assert encoded.notes["overflow"] == 0 and encoded.notes["cut_from"] == "protocol"


def test_a_listed_cut_that_does_not_fit_is_lowered():
    encoded = protocols.encode(sample("x" * 5000), PLAIN, OFFICIAL, "llama2", 2048)
    assert len(encoded.ids) + 32 <= 2048 and encoded.notes["cut_from"] == "positions" and encoded.notes["overflow"] == 0


@pytest.mark.parametrize("positions", [1, 32, 33, 71])
def test_too_few_positions(positions):
    with pytest.raises(UserError, match=f"a model of {positions} positions has no room .* 32 new tokens"):
        protocols.encode(sample("x" * 500), CHATML, OFFICIAL, None, positions)


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(0, 300),
    positions=st.integers(150, 400),
    cut=st.none() | st.integers(2, 300),
    order=st.sampled_from(["after", "before"]),
    chat=st.sampled_from(["none", "model", "[INST]{prompt}[/INST]"]),
)
def test_prompt_and_new_tokens_fit(length, positions, cut, order, chat):
    cuts = {} if cut is None else {"family": cut}
    profile = replace(OFFICIAL, cut=cuts, order=order, chat={"otherwise": chat})
    encoded = protocols.encode(sample("é" * length), CHATML, profile, "family", positions)
    assert len(encoded.ids) + 32 <= positions and encoded.notes["overflow"] == 0
    assert encoded.truncated == (encoded.n_raw > encoded.notes["cut"])
    if cut is not None:
        assert encoded.notes["cut"] <= cut


# Stops and decoding -----------------------------------------------------------------------------------------


def test_newline_stops_samsum():
    newline, eos = PLAIN.encode("\n", add_special_tokens=False)[-1], PLAIN.eos_token_id

    def stops(task, profile, family="llama2"):
        return set(protocols.encode(sample("x", task), PLAIN, profile, family, 4096).stop_ids)

    for profile, expected in ((OFFICIAL, {newline, eos}), (PAPER, {eos}), (PYRAMIDKV, {newline, eos})):
        assert stops("samsum", profile) == expected
        assert stops("trec", profile) == {eos}
    assert stops("samsum_e", OFFICIAL, None) == {newline, eos}


def test_the_models_own_stop_tokens_count_where_the_protocol_says_so():
    # Case C10: Llama-3 ends a turn with one token and a text with another.
    for profile, expected in ((OFFICIAL, {7, 9}), (PAPER, set()), (PYRAMIDKV, {7, 9})):
        encoded = protocols.encode(sample("x", "qasper"), PLAIN, profile, "llama3", 8192, [7, 9])
        assert set(encoded.stop_ids) == expected | {PLAIN.eos_token_id}


def test_least_new_tokens():
    def least(profile, task):
        return protocols.encode(sample("x", task), PLAIN, profile, "llama2", 4096).min_new_tokens

    assert [least(OFFICIAL, task) for task in ("samsum", "samsum_e", "hotpotqa")] == [1, 1, 0]
    assert {least(profile, task) for profile in (PAPER, PYRAMIDKV) for task in LONGBENCH} == {1}


def test_stop_tokens():
    """Case C10: the paper's script knows one eos; Llama-3 ends a turn with another one."""
    eos, eot = (TURNS.convert_tokens_to_ids(token) for token in ("<|end_of_text|>", "<|eot_id|>"))
    assert protocols.stop_ids(PAPER, TURNS, [eos, eot, 7]) == {eos}
    assert protocols.stop_ids(OFFICIAL, TURNS, [7]) == {7, eos}
    assert protocols.stop_ids(PYRAMIDKV, TURNS, [7]) == {7, eos, eot}
    assert protocols.stop_ids(PYRAMIDKV, PLAIN, []) == {PLAIN.eos_token_id}


def test_blanks_before_punctuation():
    """transformers before 5 took them out of Llama-3's text, so published prompts and outputs lack them."""
    ids = PLAIN(" Who was he ? He 's \n").input_ids
    assert protocols.decode(ids, PLAIN, PAPER, "llama3") == " Who was he? He's \n"
    assert protocols.decode(ids, PLAIN, PAPER, "llama2") == " Who was he ? He 's \n"
    assert protocols.decode(ids, PLAIN, OFFICIAL, "llama3") == " Who was he ? He 's \n"
    profile = replace(PAPER, cut={"llama3": 22})
    encoded = protocols.encode(sample("Who was he ?" * 9), PLAIN, profile, "llama3", 4096)
    assert text(encoded, PLAIN) == "<s>Who was heho was he?" and encoded.truncated
