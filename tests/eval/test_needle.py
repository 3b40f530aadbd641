"""The needle task: golden scores, exact prompts with every kind of tokenizer, packaged text, user errors."""

from __future__ import annotations

import dataclasses
import json
import re
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from eval import needle, needles
from eval.errors import UserError
from eval.needle import HAYSTACK, INSTRUCTION, NeedleConfig, build
from eval.needles import NEEDLES, SCORES, contains, overlap, rouge1

DOLORES = NEEDLES["dolores"]
LENGTHS = [300, 777, 2000]
DEPTHS = [0, 10, 25, 33.3, 50, 75, 90, 100]


def needle_start(sample) -> int:
    return sample.prompt.index(NEEDLES[sample.meta["needle"]].text)


# ---------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("prediction", "rouge", "share"),
    [
        ("eat a sandwich and sit in Dolores Park on a sunny day.", 80 / 11, 1.0),
        ("eat a sandwich and sit in Dolores Park on a sunny day", 80 / 11, 10 / 11),
        ("EAT A SANDWICH AND SIT IN DOLORES PARK ON A SUNNY DAY.", 80 / 11, 1.0),
        ("a on in and the day", 40 / 9, 4 / 11),
        (DOLORES.text, 10.0, 1.0),
        ("I do not know.", 0.8, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_two_published_scores(prediction, rouge, share):
    """Case N1: the JSON score against the whole needle, the heat-map score against the expected answer."""
    assert rouge1(prediction, DOLORES.text) == pytest.approx(rouge, abs=1e-12)
    assert overlap(prediction, DOLORES.answer) == pytest.approx(share, abs=1e-12)


def test_a_paraphrase_counts_for_the_key_phrases():
    """Case N2: retrieval, not wording."""
    paraphrase = "You could take a sandwich\nto dolores  park, weather permitting."
    assert contains(paraphrase, DOLORES.key_phrases) == 1.0
    assert contains("You could take a sandwich to a park.", DOLORES.key_phrases) == 0.0
    assert contains("", DOLORES.key_phrases) == 0.0


def test_reference_and_prediction_are_not_swapped():
    """Case N6: the share of the *answer's* words, however short or long the prediction is."""
    assert overlap("a b", "a b c d") == 0.5
    assert overlap("a b c d", "a b") == 1.0
    rouge = needles._rouge().score("a b c d", "a b")["rouge1"]
    assert (rouge.precision, rouge.recall) == (1.0, 0.5)


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_well_formed(name):
    item = NEEDLES[name]
    assert item.text.endswith(item.answer) and item.answer.endswith(".") and item.question.endswith("?")
    assert overlap(item.answer, item.answer) == contains(item.answer, item.key_phrases) == 1.0
    assert contains(item.question, item.key_phrases) == 0.0, "an echo of the question would count as an answer"
    others = [other for other in NEEDLES.values() if other is not item]
    assert not any(contains(other.text, item.key_phrases) for other in others)


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_score_takes_any_text(text):
    scores = {name: function(text, DOLORES) for name, function in SCORES.items()}
    assert scores.keys() == {"overlap", "rouge1", "contains"}
    assert all(isinstance(value, float) and value >= 0 for value in scores.values())


def test_task_stores_every_score(chat_tokenizer):
    task = build({"lengths": [300], "depths": [50]}, chat_tokenizer)
    assert task.score(task.samples[0], DOLORES.text) == {"overlap": 1.0, "rouge1": 10.0, "contains": 1.0}
    assert task.score(task.samples[0], "") == {"overlap": 0.0, "rouge1": 0.0, "contains": 0.0}


# --------------------------------------------------------------------------------------------- prompts


def test_prompts_have_exactly_the_length(any_tokenizer):
    task = build({"lengths": LENGTHS, "depths": DEPTHS, "needles": ["dolores", "orrin"]}, any_tokenizer)
    assert len(task.samples) == len(LENGTHS) * len(DEPTHS) * 2
    for sample in task.samples:
        encoded = task.encode(sample)
        assert len(encoded.ids) == encoded.n_raw == sample.meta["length"]
        assert not encoded.truncated and encoded.stop_ids is None and encoded.min_new_tokens == 0
        assert any_tokenizer.decode(encoded.ids, clean_up_tokenization_spaces=False) == sample.prompt


def test_answers_without_stop_tokens_are_other_answers(chat_tokenizer):
    config = {"lengths": [300], "depths": [50]}
    usual, timed = build(config, chat_tokenizer), build({**config, "stop": False}, chat_tokenizer)
    assert build({**config, "stop": True}, chat_tokenizer).identity == usual.identity != timed.identity
    (sample,) = timed.samples
    assert timed.encode(sample) == dataclasses.replace(usual.encode(sample), stop_ids=())


def test_the_smallest_possible_length(any_tokenizer):
    """The error names a length; it works, and one token less does not."""
    with pytest.raises(UserError, match="smallest possible length is") as error:
        build({"lengths": [1], "needles": "all"}, any_tokenizer)
    smallest = int(re.search(r"(\d+) tokens", str(error.value))[1])
    task = build({"lengths": [smallest], "depths": DEPTHS, "needles": "all"}, any_tokenizer)
    assert {len(task.encode(sample).ids) for sample in task.samples} == {smallest}
    with pytest.raises(UserError, match=f"length {smallest - 1} has no room"):
        build({"lengths": [smallest - 1], "needles": "all"}, any_tokenizer)


def test_every_short_length(chat_tokenizer):
    """Lengths around one sentence, where a bound that is off by one would show."""
    task = build({"lengths": list(range(130, 260)), "depths": [0, 49, 99.9, 100]}, chat_tokenizer)
    assert all(len(task.encode(sample).ids) == sample.meta["length"] for sample in task.samples)


def test_needle_stands_once_between_blanks_and_splits_no_sentence(any_tokenizer):
    task = build({"lengths": LENGTHS, "depths": DEPTHS, "needles": ["dolores", "kestrel"]}, any_tokenizer)
    for sample in task.samples:
        text = NEEDLES[sample.meta["needle"]].text
        assert sample.prompt.count(text) == 1
        before, after = sample.prompt.split(text)
        assert after[0].isspace()
        if sample.meta["actual_depth"] > 0:
            assert before[-1].isspace()
            assert before.rstrip()[-1] in ".!?", before[-40:]
        others = [other.text for name, other in NEEDLES.items() if name != sample.meta["needle"]]
        assert not any(other in sample.prompt for other in others)


def test_depth_0_is_before_the_text_and_100_directly_before_the_question(any_tokenizer):
    task = build({"lengths": [700], "depths": [0, 100]}, any_tokenizer)
    first, last = task.samples
    assert first.prompt.index(DOLORES.text) < first.prompt.index("Bread begins with very little.")
    assert first.meta["actual_depth"] == 0.0
    question = INSTRUCTION.format(question=DOLORES.question)
    assert f"{DOLORES.text}{question}" in last.prompt
    assert last.meta["actual_depth"] == 100.0


def test_depth_grows_and_moves_back_less_than_a_sentence(any_tokenizer):
    depths = list(range(0, 101, 5))
    task = build({"lengths": [3000], "depths": depths}, any_tokenizer)
    actual = [sample.meta["actual_depth"] for sample in task.samples]
    assert actual == sorted(actual) and len(set(actual)) == len(depths)
    assert all(0 <= depth - found < 5 for depth, found in zip(depths, actual, strict=True))
    starts = [needle_start(sample) for sample in task.samples]
    assert starts == sorted(starts)


def test_bos_stands_where_the_template_writes_it_and_nowhere_else(any_tokenizer):
    task = build({"lengths": LENGTHS, "depths": DEPTHS}, any_tokenizer)
    bos = any_tokenizer.bos_token_id
    if any_tokenizer.chat_template:
        message = [{"role": "user", "content": "x"}]
        text = any_tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        wanted = text.count(any_tokenizer.bos_token)
    else:
        wanted = int(any_tokenizer("x").input_ids[0] == bos)
    for sample in task.samples:
        ids = task.encode(sample).ids
        assert ids.count(bos) == wanted
        assert ids[:1].count(bos) == min(wanted, 1) and ids[1] != bos


def test_template_surrounds_the_prompt(chat_tokenizer):
    prompt = build({"lengths": [300], "depths": [50], "chat": True}, chat_tokenizer).samples[0].prompt
    assert prompt.startswith("<s><|user|>\nBread")
    assert prompt.endswith("from the text.<|end|>\n<|assistant|>\n")


def test_plain_text_on_demand(chat_tokenizer):
    prompt = build({"lengths": [300], "depths": [50], "chat": False}, chat_tokenizer).samples[0].prompt
    assert prompt.startswith("<s>Bread")
    assert prompt.endswith("\nAnswer:")


def test_question_is_that_of_the_needle(plain_tokenizer):
    task = build({"lengths": [300], "depths": [50], "needles": "all"}, plain_tokenizer)
    assert [sample.meta["needle"] for sample in task.samples] == list(NEEDLES)
    for sample in task.samples:
        item = NEEDLES[sample.meta["needle"]]
        assert sample.prompt.count(item.question) == 1
        assert sample.references == (item.answer,)


def test_samples_are_named_and_described(chat_tokenizer):
    task = build({}, chat_tokenizer)
    assert (task.name, task.main_score, len(task.samples)) == ("needle", "overlap", 15)
    assert [sample.id for sample in task.samples[:2]] == ["needle-dolores-1000-0", "needle-dolores-1000-25"]
    assert len({sample.id for sample in task.samples}) == 15
    sample = task.samples[1]
    assert (sample.task, sample.max_new_tokens) == ("needle", 30)
    assert sample.meta.keys() == {"length", "depth", "actual_depth", "needle", "answer", "haystack"}
    assert json.loads(json.dumps(sample.meta)) == sample.meta


# -------------------------------------------------------------------------------------------- haystack


def test_a_short_haystack_is_repeated(tmp_path, any_tokenizer):
    (tmp_path / "short.txt").write_text("It rained at noon. Later it cleared up.\n", encoding="utf-8")
    task = build({"lengths": [400], "depths": [0, 50, 100], "haystack": str(tmp_path)}, any_tokenizer)
    for sample in task.samples:
        assert len(task.encode(sample).ids) == 400
        assert sample.prompt.count(DOLORES.text) == 1
        assert sample.prompt.count("It rained at noon.") > 5


def test_a_haystack_without_sentences(tmp_path, any_tokenizer):
    """There is no place but its beginning and its end; yet the prompts are made."""
    (tmp_path / "list.txt").write_text("milk, eggs, " * 300, encoding="utf-8")
    task = build({"lengths": [300], "depths": [50, 100], "haystack": str(tmp_path)}, any_tokenizer)
    assert [sample.meta["actual_depth"] for sample in task.samples] == [0.0, 100.0]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("One. Two! Three? Four.", ["One.", "Two!", "Three?", "Four."]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("(It is so.) 12 men came.", ["(It is so.)", "12 men came."]),
        (
            "Mr. A. Smith met Dr. Jones, e.g. at 3.5 km. Done.",
            ["Mr. A. Smith met Dr. Jones, e.g. at 3.5 km.", "Done."],
        ),
        ("A heading\n\nText goes on\nhere. End", ["A heading", "Text goes on\nhere.", "End"]),
        ("Wait ... what? Yes.", ["Wait ... what?", "Yes."]),
    ],
)
def test_ends_of_sentences(text, ends):
    stops = [match.end() for match in needle._SENTENCE_END.finditer(f"{text}\n\n")]
    assert [text[a:b].strip() for a, b in zip([0, *stops], stops, strict=False)] == ends


def test_folders_are_read_recursively_and_sorted(tmp_path):
    for name, text in {
        "b.txt": "B.\n",
        "a/z.txt": "Z.",
        "a.txt": "\nA.",
        "c.md": "no",
        "empty.txt": " \n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert needle.read_haystack(tmp_path) == "A.\n\nZ.\n\nB.\n\n"


def test_seed_shuffles_the_files(chat_tokenizer):
    """Case N5: another seed, another filler, another hash; the same seed, the same samples."""
    config = {"lengths": [400], "depths": [50]}
    tasks = [build({**config, "seed": seed}, chat_tokenizer) for seed in (None, 1, 2, 2)]
    prompts, hashes = [task.samples[0].prompt for task in tasks], [task.data_hash for task in tasks]
    texts = [task.samples[0].meta["haystack"] for task in tasks]
    for values in (prompts, hashes, texts):
        assert len(set(values)) == 3
        assert values[2] == values[3]


def test_data_hash_covers_what_the_samples_are_made_from(chat_tokenizer, tmp_path, monkeypatch):
    config = {"lengths": [300], "depths": [50]}
    task = build(config, chat_tokenizer)
    assert re.fullmatch("[0-9a-f]{64}", task.data_hash)
    assert build({**config, "lengths": [400], "score": "rouge1"}, chat_tokenizer).data_hash == task.data_hash
    assert build({**config, "needles": ["quill"]}, chat_tokenizer).data_hash != task.data_hash
    (tmp_path / "a.txt").write_text("Other text. " * 50, encoding="utf-8")
    assert build({**config, "haystack": str(tmp_path)}, chat_tokenizer).data_hash != task.data_hash
    monkeypatch.setattr(needle, "INSTRUCTION", "\n\n{question}")
    assert build(config, chat_tokenizer).data_hash != task.data_hash


def test_packaged_text_is_long_plain_and_without_repetitions():
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(HAYSTACK.glob("*.txt"))}
    assert len(texts) >= 12
    words = [word for text in texts.values() for word in text.split()]
    assert len(words) >= 10_000
    sentences = [
        sentence
        for text in texts.values()
        for paragraph in text.split("\n\n")
        for sentence in re.split(r"(?<=[.?!]) ", paragraph.strip())
    ]
    assert len(sentences) == len({sentence.lower() for sentence in sentences})
    for name, text in texts.items():
        assert text.isascii() and text.endswith("\n") and not re.search(r"[#*_`\t]|  |\n\n\n", text), name
        paragraphs = text.strip().split("\n\n")
        assert len(paragraphs) >= 5 and all("\n" not in paragraph for paragraph in paragraphs), name


@pytest.mark.parametrize("name", NEEDLES)
def test_packaged_text_hints_at_no_needle(name):
    text = needle.read_haystack().lower()
    item = NEEDLES[name]
    names = {word.strip(string.punctuation) for word in item.text.split()[1:] if word[0].isupper()}
    assert names and not [word for word in names if re.search(rf"\b{word.lower()}\b", text)]
    assert not [phrase for phrase in item.key_phrases if re.search(rf"\b{phrase.lower()}", text)]


# ----------------------------------------------------------------------------------------- user errors


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"length": [1000]}, "unknown field length; allowed are name, lengths, depths"),
        ({"lengths": 1000}, "lengths is 1000, but must be a list of positive whole numbers"),
        ({"lengths": []}, r"lengths is \[\]"),
        ({"lengths": [1000, 0]}, "lengths is 0"),
        ({"lengths": [-5]}, "lengths is -5"),
        ({"lengths": [1000.5]}, "lengths is 1000.5"),
        ({"lengths": [True]}, "lengths is True"),
        ({"lengths": [1000, 1000]}, "lengths is 1000, but must be free of repetitions"),
        ({"depths": [101]}, "depths is 101, but must be a list of percentages from 0 to 100"),
        ({"depths": [-1]}, "depths is -1"),
        ({"depths": [float("nan")]}, "depths is nan"),
        ({"depths": "all"}, "depths is 'all'"),
        ({"needles": ["dolores", "nobody"]}, "needles is 'nobody', .*dolores, ottoline.* or the word all"),
        ({"needles": "nobody"}, "needles is 'nobody'"),
        ({"needles": [["dolores"]]}, "needles is"),
        ({"haystack": "/no/such/folder"}, "haystack is '/no/such/folder', but must be null or an existing"),
        ({"haystack": 3}, "haystack is 3"),
        ({"seed": "x"}, "seed is 'x', but must be null or a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"score": "accuracy"}, "score is 'accuracy', but must be one of overlap, rouge1, contains"),
        ({"score": ["overlap"]}, "score is"),
        ({"chat": "yes"}, "chat is 'yes', but must be auto, true or false"),
        ({"stop": 0}, "stop is 0, but must be true or false"),
        ({"name": ""}, "name is ''"),
        ({"chat": True}, "chat is true, but the tokenizer has no chat template"),
        ({"lengths": [30]}, "length 30 has no room for template, needle and question; the smallest"),
    ],
)
def test_user_errors(config, message, plain_tokenizer):
    with pytest.raises(UserError, match=message) as error:
        build(config, plain_tokenizer)
    assert str(error.value).startswith("task needle: ") and str(error.value).endswith(".")


def test_length_beyond_the_model(plain_tokenizer):
    build({"lengths": [470]}, plain_tokenizer, 500)
    with pytest.raises(UserError, match="exceeds the 500 positions.*largest possible length is 470"):
        build({"lengths": [471]}, plain_tokenizer, 500)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no .txt file with text in it"),
        (b" \n\n", "has no .txt file with text in it"),
        (b"caf\xe9", r"bad.txt' is not UTF-8 \(byte 3\)"),
        (NEEDLES["quill"].text.upper().replace(" ", "\n").encode(), "already contains the needle 'quill'"),
        (b"One. <s> Two.", "haystack contains the special tokens <s>"),
    ],
)
def test_bad_haystacks(content, message, tmp_path, plain_tokenizer):
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        build({"haystack": str(tmp_path)}, plain_tokenizer)


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(UserError, match="must be fast"):
        build({}, object())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}", "stray BOS"),
        ("{{ messages[0]['content'] }}{{ messages[0]['content'] }}", "exactly once"),
        ("hello", "exactly once"),
    ],
)
def test_a_template_that_cannot_work_is_refused(template, message, chat_tokenizer, monkeypatch):
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=message):
        build({}, chat_tokenizer)


# --------------------------------------------------------------------------------------- configuration


def test_configuration_file_has_the_defaults():
    path = Path(needle.__file__).parents[1] / "conf" / "task" / "needle.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    defaults = {field.name: field.default for field in dataclasses.fields(NeedleConfig)}
    assert list(config) == list(defaults)
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()} == defaults
    assert all(name in path.read_text(encoding="utf-8") for name in NEEDLES)
