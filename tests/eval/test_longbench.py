"""Rows of LongBench from a folder, from the hub or made on the spot; what is refused, and in which words."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

import pytest
import yaml

from eval import longbench, protocols
from eval.errors import UserError
from eval.metrics import LONGBENCH, LONGBENCH_E
from eval.samples import Encoded
from graphkv.models import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("GRAPHKV_SHARED", ROOT.parent / "shared")) / "data/longbench"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no LongBench rows in {SHARED}")

CONFIG = yaml.safe_load((ROOT / "conf/task/longbench.yaml").read_text(encoding="utf-8"))
TOKENIZER = byte_tokenizer()
REAL_E = ("2wikimqa_e", "gov_report_e", "hotpotqa_e", "triviaqa_e")


def profile(name: str = "official") -> protocols.ProtocolProfile:
    path = ROOT / f"conf/protocol/{name}.yaml"
    return protocols.parse(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def build(data: str | Path, tasks: list[str], protocol: str = "official", **options) -> longbench.LongBenchTask:
    config = CONFIG | {"data": str(data), "tasks": tasks}
    return longbench.build(config, TOKENIZER, profile(protocol), "smollm2", 8192, **options)


def row(number: int = 0, task: str = "hotpotqa", **changes) -> dict:
    """A row in LongBench's shape."""
    return {
        "input": "Who?",
        "context": f"Passage {number}:\nA text.",
        "answers": ["Ada", "Ada L."],
        "length": 7,
        "dataset": task,
        "language": "en",
        "all_classes": ["Person", "Date"] if task.startswith("trec") else None,
        "_id": f"{number:048x}",
    } | changes


def write(folder: Path, rows: list, task: str = "hotpotqa") -> Path:
    lines = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in rows]
    (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


# Rows -------------------------------------------------------------------------------------------------------


def test_official_numbers_of_rows():
    """Cases P12, P13."""
    assert sum(longbench.ROWS[task] for task in LONGBENCH) == 3750
    assert sum(longbench.ROWS[task] for task in LONGBENCH_E) == 3668
    assert [longbench.ROWS[task] for task in ("hotpotqa", "multifieldqa_en", "lcc", "repobench-p")] == [
        *(200, 150, 500, 500)
    ]


def test_the_file_names_the_16_tasks():
    assert tuple(CONFIG["tasks"]) == LONGBENCH and CONFIG["data"] == "hub"


@needs_shared
def test_real_rows_of_all_tasks_load():
    task = build(SHARED, [*LONGBENCH, *REAL_E], partial=True)
    assert {sample.task for sample in task.samples} == {*LONGBENCH, *REAL_E}
    assert len({sample.id for sample in task.samples}) == len(task.samples) == 648
    for sample in task.samples:
        assert sample.references and sample.meta["data"] == "folder" and sample.meta["length"] > 0
        assert (sample.meta["all_classes"] is None) == (sample.task != "trec")
        json.dumps(dict(sample.meta))


@needs_shared
def test_real_rows_are_not_changed():
    for name in ("multi_news", "trec", "samsum"):
        lines = (SHARED / f"{name}.jsonl").read_bytes().split(b"\n")[:-1]
        rows, sha256 = longbench.read(SHARED, name)
        assert [dict(r) for r in rows] == [json.loads(line) for line in lines]
        assert sha256 == hashlib.sha256((SHARED / f"{name}.jsonl").read_bytes()).hexdigest()


@needs_shared
def test_a_complete_file_needs_no_partial():
    assert len(build(SHARED, ["multi_news"]).samples) == 200


@needs_shared
@pytest.mark.parametrize("task", LONGBENCH)
@pytest.mark.parametrize("protocol", ["official", "paper", "pyramidkv2026"])
def test_real_prompts_fit(task, protocol):
    built = build(SHARED, [task], protocol, limit=2)
    for sample in built.samples:
        encoded = built.encode(sample)
        assert isinstance(encoded, Encoded) and len(encoded.ids) + sample.max_new_tokens <= 8192
        assert encoded.truncated == (encoded.n_raw > encoded.notes["cut"])


@needs_shared
@pytest.mark.parametrize("task", LONGBENCH)
def test_a_reference_scores_full_marks(task):
    built = build(SHARED, [task], limit=2)
    for sample in built.samples:
        assert built.score(sample, sample.references[-1])[built.main_score] == pytest.approx(1, abs=1e-6)


def test_samples_keep_the_order_and_limit_takes_the_first_of_every_task(tmp_path):
    write(tmp_path, [row(n) for n in (3, 1, 2)])
    write(tmp_path, [row(n, "trec") for n in (6, 5)], "trec")
    ids = [s.id[-1] for s in build(tmp_path, ["trec", "hotpotqa"], partial=True).samples]
    assert ids == ["6", "5", "3", "1", "2"]
    assert [s.id[-1] for s in build(tmp_path, ["trec", "hotpotqa"], limit=1).samples] == ["6", "3"]
    assert len(build(tmp_path, ["hotpotqa"], limit=99).samples) == 3


def test_ids_of_two_tasks_do_not_clash(tmp_path):
    write(tmp_path, [row(1)])
    write(tmp_path, [row(1, "hotpotqa_e")], "hotpotqa_e")
    ids = [sample.id for sample in build(tmp_path, ["hotpotqa", "hotpotqa_e"], partial=True).samples]
    assert ids == [f"hotpotqa/{1:048x}", f"hotpotqa_e/{1:048x}"]


def test_odd_text_survives(tmp_path):
    odd = "a\u2028b\x85c\r\nd\x00 {input} \\n é 😀"
    sample = build(write(tmp_path, [row(context=odd)]), ["hotpotqa"], partial=True).samples[0]
    assert f"passages.\n{odd}\n\nAnswer" in sample.prompt


def test_hash_is_of_the_data(tmp_path):
    write(tmp_path, [row(n) for n in range(3)])
    write(tmp_path, [row(n, "trec") for n in range(3)], "trec")
    both = build(tmp_path, ["hotpotqa", "trec"], partial=True)
    assert both.facts["data_hash"] == build(tmp_path, ["trec", "hotpotqa"], limit=1).facts["data_hash"]
    one = build(tmp_path, ["hotpotqa"], partial=True)
    assert one.facts["data_hash"] != both.facts["data_hash"]
    assert one.samples[0].meta == both.samples[0].meta
    stat = (tmp_path / "hotpotqa.jsonl").stat()
    write(tmp_path, [row(n, context=f"Passage {n}:\nA tale.") for n in range(3)])
    os.utime(tmp_path / "hotpotqa.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = build(tmp_path, ["hotpotqa"], partial=True)
    assert changed.facts["data_hash"] != one.facts["data_hash"] and "A tale." in changed.samples[0].prompt


# Scores -----------------------------------------------------------------------------------------------------


def test_best_reference_counts(tmp_path):
    """Case P9."""
    task = build(write(tmp_path, [row(answers=["x", "the cat"])]), ["hotpotqa"], partial=True)
    assert task.score(task.samples[0], "the cat")["score"] == 1.0
    assert task.score(task.samples[0], "")["score"] == 0.0


def test_first_line_of_few_shot_tasks(tmp_path):
    """Case P5."""
    classes = ["NUM", "Date"]
    write(tmp_path, [row(0, "trec", answers=["NUM"], all_classes=classes)], "trec")
    write(tmp_path, [row(0, answers=["NUM Type x"])])
    task = build(tmp_path, ["trec", "hotpotqa"], partial=True)
    scores = [task.score(sample, "\n\nNUM\nType: x Date")["score"] for sample in task.samples]
    assert scores == [1.0, pytest.approx(6 / 7)]


@pytest.mark.parametrize(("protocol", "score"), [("official", 0.25), ("paper", 0.5), ("pyramidkv2026", 0.5)])
def test_the_protocol_names_the_similarity(tmp_path, protocol, score):
    write(tmp_path, [row(0, "lcc", input="", answers=["diet"])], "lcc")
    task = build(tmp_path, ["lcc"], protocol, partial=True)
    assert task.score(task.samples[0], "tide")["score"] == score


# What is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('{"input": "Who?", "cont', "line 2: not JSON"),
        ("[1, 2]", "line 2: a LongBench row is a JSON object, this is a list"),
        ("null", "line 2: a LongBench row is a JSON object"),
        ({k: v for k, v in row(1).items() if k != "context"}, "line 2: the field 'context' is missing"),
        (row(1, score=3), "line 2: 'score' is no field of LongBench"),
        (row(1, context=5), "line 2: the field 'context' is of type int"),
        (row(1, input=None), "line 2: the field 'input' is of type NoneType"),
        (row(1, length="7"), "line 2: the field 'length' is of type str"),
        (row(1, length=True), "line 2: the field 'length' is of type bool"),
        (row(1, answers="Ada"), "line 2: the field 'answers' is of type str"),
        (row(1, answers=["Ada", 3]), "line 2: the field 'answers' holds something that is not a string"),
        (row(1, answers=[]), "line 2: the row has no answers"),
        (row(1, all_classes="Date"), "line 2: the field 'all_classes' is of type str"),
        (row(1, dataset="musique"), "line 2: the row belongs to 'musique', expected 'hotpotqa'"),
        (row(0), "line 2: the _id '" + "0" * 48 + "' is there twice"),
    ],
)
def test_broken_rows(tmp_path, broken, message):
    write(tmp_path, [row(0), broken, row(2)])
    with pytest.raises(UserError) as error:
        build(tmp_path, ["hotpotqa"], partial=True)
    assert f"hotpotqa.jsonl, {message}" in str(error.value) and "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "hotpotqa.jsonl").write_bytes(b'{"input": "\xff"}\n')
    with pytest.raises(UserError, match="line 1: not JSON"):
        build(tmp_path, ["hotpotqa"], partial=True)


def test_half_a_character(tmp_path):
    write(tmp_path, [json.dumps(row(context="\ud800"))])
    with pytest.raises(UserError, match="hotpotqa.jsonl cannot be read"):
        build(tmp_path, ["hotpotqa"], partial=True)


def test_trec_needs_classes(tmp_path):
    write(tmp_path, [row(0, "trec", all_classes=[])], "trec")
    with pytest.raises(UserError, match="line 1: a trec row needs its class names"):
        build(tmp_path, ["trec"], partial=True)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_file(tmp_path, text):
    (tmp_path / "hotpotqa.jsonl").write_text(text)
    with pytest.raises(UserError, match="hotpotqa.jsonl has no rows"):
        build(tmp_path, ["hotpotqa"], partial=True)


def test_number_of_rows(tmp_path):
    write(tmp_path, [row(n) for n in range(3)])
    with pytest.raises(UserError, match="hotpotqa.jsonl has 3 rows, LongBench has 200: say partial=true"):
        build(tmp_path, ["hotpotqa"])


def test_missing_file_names_what_is_there(tmp_path):
    write(tmp_path, [row(0)])
    (tmp_path / "notes.jsonl").write_text("")
    with pytest.raises(UserError, match=r"there is no .*/trec.jsonl: .* has hotpotqa$"):
        build(tmp_path, ["trec"])
    with pytest.raises(UserError, match="there is no .*nowhere/trec.jsonl.* mini or hub.* none of them"):
        build(tmp_path / "nowhere", ["trec"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": "hotpotqa"}, "task.tasks is 'hotpotqa', expected a list"),
        ({"tasks": []}, "task.tasks is"),
        ({"tasks": ["hotpot"]}, "unknown LongBench task 'hotpot'"),
        ({"tasks": ["trec", "trec"]}, "task.tasks names a task twice"),
        ({"tasks": ["trec_e"]}, "task.tasks has trec_e, but the rows of task.data=mini are short"),
        ({"data": None}, "task.data is None, allowed are hub, mini and the path of a folder"),
        ({"data": ""}, "task.data is ''"),
        ({"dataa": "mini"}, "task.dataa is unknown"),
        ({"data": "hub", "hub": {"repo": "x"}}, "task.hub has the keys repo, expected repo, revision"),
    ],
)
def test_bad_settings(changes, message):
    config = CONFIG | {"data": "mini"} | changes
    with pytest.raises(UserError) as error:
        longbench.build(config, TOKENIZER, profile(), None, 8192)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_missing_setting():
    with pytest.raises(UserError, match="task.tasks is missing"):
        longbench.build({"name": "longbench", "data": "mini"}, TOKENIZER, profile(), None, 8192)


@pytest.mark.parametrize("limit", [0, -3, 2.0, "3", True])
def test_bad_limit(limit):
    with pytest.raises(UserError, match="limit is .*, expected a whole number of at least 1, or null"):
        build("mini", ["trec"], limit=limit)


# The hub ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local archive in place of the hub's; `pack` makes it, `calls` are the downloads."""
    monkeypatch.setenv("GRAPHKV_CACHE", str(tmp_path / "cache"))
    archive = tmp_path / "data.zip"

    class Hub:
        calls: list[tuple] = []
        config = CONFIG["hub"] | {"revision": "f" * 40}

        def pack(self, members: dict[str, str]) -> None:
            with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
                for name, text in members.items():
                    packed.writestr(name, text)
            self.sign()

        def sign(self) -> None:
            self.config = self.config | {"sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}

        def build(self, *tasks: str) -> longbench.LongBenchTask:
            config = CONFIG | {"data": "hub", "tasks": list(tasks), "hub": self.config}
            return longbench.build(config, TOKENIZER, profile(), None, 8192, partial=True)

    hub = Hub()
    hub.archive, hub.cache = archive, tmp_path / "cache"

    def download(*args, **options):
        hub.calls.append((args, options))
        return str(archive)

    hub.calls = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return hub


def test_hub_is_pinned():
    assert len(CONFIG["hub"]["revision"]) == 40 and len(CONFIG["hub"]["sha256"]) == 64


def test_hub_downloads_once(hub):
    hub.pack({f"data/{t}.jsonl": json.dumps(row(0, t)) for t in ("hotpotqa", "trec", "trec_e")})
    first = hub.build("hotpotqa", "trec_e")
    assert [sample.meta["data"] for sample in first.samples] == ["hub", "hub"]
    (args, options) = hub.calls[0]
    assert args == ("zai-org/LongBench", "data.zip")
    assert options["revision"] == "f" * 40 and options["repo_type"] == "dataset"
    assert Path(options["cache_dir"]).is_relative_to(hub.cache)
    assert hub.build("trec_e", "hotpotqa").facts["data_hash"] == first.facts["data_hash"] and len(hub.calls) == 1
    assert sorted(p.name for p in (hub.cache / "longbench" / ("f" * 40)).iterdir()) == [
        "hotpotqa.jsonl",
        "trec_e.jsonl",
    ]


def test_archive_does_not_decide_where_files_go(hub, tmp_path):
    text = json.dumps(row(0))
    outside = {f"{up}hotpotqa.jsonl": "evil" for up in ("../", "../../", "data/../../", "/tmp/graphkv-evil-")}
    hub.pack({**outside, "data/hotpotqa.jsonl": text, "hotpotqa.jsonl": "evil"})
    before = set(tmp_path.rglob("*"))
    assert len(hub.build("hotpotqa").samples) == 1
    new = {path for path in set(tmp_path.rglob("*")) - before if path.is_file() and "datasets" not in path.parts}
    assert new == {hub.cache / "longbench" / ("f" * 40) / "hotpotqa.jsonl"}
    assert not Path("/tmp/graphkv-evil-hotpotqa.jsonl").exists()


def test_archive_of_other_content(hub):
    hub.pack({"data/hotpotqa.jsonl": json.dumps(row(0))})
    hub.config = hub.config | {"sha256": "0" * 64}
    with pytest.raises(UserError, match="has the sha256 .*, task.hub.sha256 is 0000.*: it is not LongBench"):
        hub.build("hotpotqa")
    assert not list(hub.cache.rglob("*.jsonl"))


def test_archive_without_the_task(hub):
    hub.pack({"data/trec.jsonl": "{}"})
    with pytest.raises(UserError, match=r"data.zip has no data/hotpotqa.jsonl"):
        hub.build("hotpotqa")


def test_archive_that_is_no_zip(hub):
    hub.archive.write_bytes(b"not a zip")
    hub.sign()
    with pytest.raises(UserError, match="data.zip is damaged"):
        hub.build("hotpotqa")


def test_damaged_archive_leaves_no_file(hub):
    hub.pack({"data/hotpotqa.jsonl": json.dumps(row(0, context="x" * 5000 + str(list(range(3000)))))})
    content = bytearray(hub.archive.read_bytes())
    for position in range(200, 260):
        content[position] ^= 255
    hub.archive.write_bytes(content)
    hub.sign()
    with pytest.raises(UserError, match="data.zip is damaged"):
        hub.build("hotpotqa")
    assert not list(hub.cache.rglob("*.jsonl"))


def test_no_connection(hub, monkeypatch):
    def refuse(*args, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(UserError) as error:
        hub.build("hotpotqa")
    message = str(error.value)
    assert "could not be downloaded (ConnectionError): unpack data.zip of the dataset zai-org/LongBench" in message
    assert "task.data" in message and "\n" not in message


# Mini -------------------------------------------------------------------------------------------------------


def test_mini_is_marked():
    task = build("mini", ["hotpotqa", "lcc", "trec"], limit=2)
    assert [sample.meta["data"] for sample in task.samples] == ["mini"] * 6
    assert task.samples[0].id == "hotpotqa/mini-hotpotqa-00"


def test_mini_is_whole_without_partial():
    assert len(build("mini", list(LONGBENCH)).samples) == 320
