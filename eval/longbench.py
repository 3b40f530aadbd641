"""LongBench and LongBench-E: rows from the hub, a folder or made on the spot; prompts; scores."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import mini, protocols, templates
from eval.errors import UserError
from eval.metrics import LONGBENCH, LONGBENCH_E, METRIC_VERSIONS, score_row
from eval.samples import Encoded, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS: Mapping[str, int] = (
    dict.fromkeys(LONGBENCH, 200)
    | {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}
    | dict.fromkeys(LONGBENCH_E, 300)
    | {"multifieldqa_en_e": 150, "qasper_e": 224, "multi_news_e": 294}
)
"""Rows of each official file: 3,750 in the 16 tasks, 3,668 in LongBench-E (THUDM/LongBench, task.md)."""

_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "input": str,
    "context": str,
    "answers": list,
    "length": int,
    "dataset": str,
    "language": str,
    "all_classes": (list, type(None)),
    "_id": str,
}
_KEYS = ("name", "data", "tasks", "hub")
_HUB_KEYS = ("repo", "revision", "archive", "sha256")


@dataclass(frozen=True)
class LongBenchTask:
    """The samples of some LongBench tasks under a protocol; an `eval.samples.Task`.

    Attributes
    ----------
    name
        `longbench-<protocol>`, or `mini-<protocol>` for the rows that are made on the spot.
    samples
        Task by task in the order asked for, each in file order; `limit=N` leaves the first N of every task.
        `meta` holds `length`, `language`, `all_classes`, `data` (`hub`, `folder` or `mini`) and
        `data_sha256`.
    identity
        By task: its file's and its template's sha256, protocol, chat template and metric versions; it does not
        depend on `limit` or on which other tasks were asked for.
    facts
        `protocol`, `similarity`, `data` (`hub`, `folder` or `mini`) and `data_hash`: sha256 over the files'
        hashes and the templates.
    """

    name: str
    samples: Sequence[Sample]
    identity: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase
    profile: protocols.ProtocolProfile
    family: str | None
    max_positions: int
    model_stop_ids: frozenset[int]
    main_score: str = "score"
    measure: str = "answer"

    def encode(self, sample: Sample) -> Encoded:
        """Token ids of `sample` under the protocol."""
        return protocols.encode(
            sample, self.tokenizer, self.profile, self.family, self.max_positions, self.model_stop_ids
        )

    def text(self, ids: Sequence[int]) -> str:
        """Text of generated ids under the protocol, not stripped."""
        return protocols.decode(ids, self.tokenizer, self.profile, self.family)

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Scores of the answer `text`; `score` is the official one, in 0..1."""
        return score_row(
            sample.task,
            text,
            sample.references,
            sample.meta["all_classes"],
            self.profile.similarity,
        )


def build(
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    profile: protocols.ProtocolProfile,
    family: str | None,
    max_positions: int,
    *,
    model_stop_ids: Collection[int] = (),
    limit: int | None = None,
    partial: bool = False,
) -> LongBenchTask:
    """Read the rows that the configuration asks for.

    Parameters
    ----------
    config
        The keys of `conf/task/longbench.yaml`.
    tokenizer, profile, family, max_positions, model_stop_ids
        As for `eval.protocols.encode`.
    limit
        Take the first so many rows of every task; None: all.
    partial
        Accept files with another number of rows than the official ones; so does a `limit`.

    Raises
    ------
    UserError
        Unknown key or task, no data, a broken row, or a number of rows that is not the official one.
    """
    tasks = _checked_tasks(config)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UserError(f"limit is {limit!r}, expected a whole number of at least 1, or null")
    rows, hashes = {}, {}
    if config["data"] == "mini":
        for task in tasks:
            rows[task], hashes[task] = mini.rows(task), mini.data_hash(task)
    else:
        hub = config["data"] == "hub"
        folder = fetch(config["hub"], tasks) if hub else Path(config["data"]).expanduser()
        for task in tasks:
            rows[task], hashes[task] = read(folder, task)
            if len(rows[task]) != ROWS[task] and limit is None and not partial:
                raise UserError(
                    f"{folder / task}.jsonl has {len(rows[task])} rows, LongBench has {ROWS[task]}: "
                    f"say partial=true to use it nevertheless"
                )
    limits = {task: templates.MAX_NEW_TOKENS[templates.base(task)] for task in tasks}
    if config["data"] == "mini":
        limits = {task: min(tokens, mini.MAX_NEW_TOKENS) for task, tokens in limits.items()}
    source = config["data"] if config["data"] in ("hub", "mini") else "folder"
    samples = tuple(
        Sample(
            id=f"{task}/{row['_id']}",
            task=task,
            prompt=templates.fill(task, row),
            references=tuple(row["answers"]),
            max_new_tokens=limits[task],
            meta={
                "length": row["length"],
                "language": row["language"],
                "all_classes": row["all_classes"],
                "data": source,
                "data_sha256": hashes[task],
            },
        )
        for task in tasks
        for row in _first(rows[task], limit)
    )
    lines = [f"{task} {hashes[task]} {templates.SHA256[templates.base(task)]}\n" for task in sorted(tasks)]
    data_hash = hashlib.sha256("".join(lines).encode()).hexdigest()
    facts = {
        "protocol": profile.name,
        "similarity": profile.similarity,
        "data": source,
        "data_hash": data_hash,
    }
    chat_template = tokenizer.chat_template if "model" in profile.chat.values() else None
    identity = {
        task: {
            "data": hashes[task],
            "template": templates.SHA256[templates.base(task)],
            "max_new_tokens": limits[task],
            "protocol": asdict(profile),
            "chat_template": chat_template,
            "metric_versions": METRIC_VERSIONS,
        }
        for task in tasks
    }
    name = f"{'mini' if source == 'mini' else 'longbench'}-{profile.name}"
    return LongBenchTask(
        name, samples, identity, facts, tokenizer, profile, family, max_positions, frozenset(model_stop_ids)
    )


def read(folder: Path, task: str) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Rows of `folder/<task>.jsonl` and the sha256 of the file.

    The rows are a typed `datasets.Dataset`, memory-mapped from the cache folder, where a file's table is kept
    under the file's hash.

    Raises
    ------
    UserError
        No such file, or a row that is not LongBench's: the message has the line.
    """
    path = folder / f"{task}.jsonl"
    if not path.is_file():
        there = sorted(p.stem for p in folder.glob("*.jsonl") if p.stem in ROWS)
        raise UserError(
            f"there is no {path}: task.data is a folder of LongBench files, mini or hub; "
            f"{folder} has {', '.join(there) or 'none of them'}"
        )
    sha256 = _check_file(path, task)
    # datasets takes a second to import, and a run without LongBench files need not pay for it.
    from datasets import Features, List, Value, disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetGenerationError

    text, texts = Value("string"), List(Value("string"))
    kinds = {"length": Value("int64"), "answers": texts, "all_classes": texts}
    features = Features({name: kinds.get(name, text) for name in _FIELDS})
    disable_progress_bars()
    try:
        table = load_dataset(
            "json",
            data_files=str(path),
            features=features,
            split="train",
            cache_dir=str(cache_folder() / "datasets" / sha256[:16]),
        )
    except DatasetGenerationError as error:
        raise UserError(f"{path} cannot be read: {error.__cause__}") from error
    return table, sha256


def check_row(row: Any, task: str, where: str) -> None:
    """Refuse what is not a row of `task`.

    Raises
    ------
    UserError
        A field is missing, unknown or of another type, the answers are empty, the row belongs to another
        task, or trec has no classes; the message begins with `where`.
    """
    if not isinstance(row, dict):
        raise UserError(f"{where}: a LongBench row is a JSON object, this is a {type(row).__name__}")
    if missing := [name for name in _FIELDS if name not in row]:
        raise UserError(f"{where}: the field {missing[0]!r} is missing")
    if unknown := [name for name in row if name not in _FIELDS]:
        raise UserError(f"{where}: {unknown[0]!r} is no field of LongBench, those are {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            raise UserError(f"{where}: the field {name!r} is of type {type(row[name]).__name__}")
    for name in ("answers", "all_classes"):
        if not all(isinstance(item, str) for item in row[name] or []):
            raise UserError(f"{where}: the field {name!r} holds something that is not a string")
    if not row["answers"]:
        raise UserError(f"{where}: the row has no answers, nothing can be scored against it")
    if row["dataset"] != task:
        raise UserError(f"{where}: the row belongs to {row['dataset']!r}, expected {task!r}")
    if templates.base(task) == "trec" and not row["all_classes"]:
        raise UserError(f"{where}: a trec row needs its class names in 'all_classes'")


def fetch(hub: Mapping[str, Any], tasks: Iterable[str]) -> Path:
    """Folder with the files of `tasks`, taken from LongBench's archive on the hub where they are missing.

    Parameters
    ----------
    hub
        `repo`, `revision` and `archive` name the archive, `sha256` (hex) is what it must be.
    tasks
        Which files to take out.

    Raises
    ------
    UserError
        The archive cannot be downloaded, is not the expected one, or lacks a file.
    """
    if set(hub) != set(_HUB_KEYS):
        raise UserError(f"task.hub has the keys {', '.join(hub)}, expected {', '.join(_HUB_KEYS)}")
    folder = cache_folder() / "longbench" / hub["revision"]
    missing = [task for task in tasks if not (folder / f"{task}.jsonl").is_file()]
    if not missing:
        return folder
    from huggingface_hub import hf_hub_download  # half a second that local files need not pay
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        archive = hf_hub_download(
            hub["repo"],
            hub["archive"],
            repo_type="dataset",
            revision=hub["revision"],
            cache_dir=cache_folder() / "hub",
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"LongBench is not in {folder} and could not be downloaded ({type(error).__name__}): unpack "
            f"{hub['archive']} of the dataset {hub['repo']} at {hub['revision']} and name its folder with "
            "task.data"
        ) from error
    with open(archive, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != hub["sha256"]:
        raise UserError(f"{archive} has the sha256 {found}, task.hub.sha256 is {hub['sha256']}: it is not LongBench")
    unpack(Path(archive), folder, missing)
    return folder


def unpack(archive: Path, folder: Path, tasks: Iterable[str]) -> None:
    """Take `data/<task>.jsonl` of each task out of LongBench's archive.

    Members are asked for by name and written under names of ours: nothing inside the archive decides where a
    file goes. A file appears whole or not at all.

    Raises
    ------
    UserError
        Not a zip file, damaged, or without one of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as packed:
            for task in tasks:
                part = folder / f"{task}.{os.getpid()}.part"
                with packed.open(f"data/{task}.jsonl") as source, part.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
                part.replace(folder / f"{task}.jsonl")
    except KeyError as error:
        raise UserError(f"{archive} has no data/{task}.jsonl") from error
    except (zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{archive} is damaged: {error}") from error


def cache_folder() -> Path:
    """Where downloads and tables are kept: `GRAPHKV_CACHE`, by default `~/.cache/graphkv`."""
    return Path(os.environ.get("GRAPHKV_CACHE") or "~/.cache/graphkv").expanduser()


def _checked_tasks(config: Mapping[str, Any]) -> list[str]:
    """The tasks of a configuration that is in order."""
    if unknown := sorted(set(config) - set(_KEYS)):
        raise UserError(f"task.{unknown[0]} is unknown, task=longbench has {', '.join(_KEYS)}")
    if missing := [key for key in _KEYS if key not in config]:
        raise UserError(f"task.{missing[0]} is missing, task=longbench has {', '.join(_KEYS)}")
    tasks, data = config["tasks"], config["data"]
    if isinstance(tasks, str) or not isinstance(tasks, Sequence) or not tasks:
        raise UserError(f"task.tasks is {tasks!r}, expected a list such as [hotpotqa,trec]")
    if not isinstance(data, str) or not data:
        raise UserError(f"task.data is {data!r}, allowed are hub, mini and the path of a folder")
    for task in tasks:
        templates.base(task)
        if data == "mini" and task in LONGBENCH_E:
            raise UserError(f"task.tasks has {task}, but the rows of task.data=mini are short: leave out _e")
    if len(set(tasks)) < len(tasks):
        raise UserError(f"task.tasks names a task twice: {', '.join(tasks)}")
    return list(tasks)


def _check_file(path: Path, task: str) -> str:
    """sha256 of a file whose every line is a row of `task`, with an `_id` of its own."""
    digest, ids = hashlib.sha256(), set()
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            digest.update(line)
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where}: not JSON ({error})") from error
            check_row(row, task, where)
            if row["_id"] in ids:
                raise UserError(f"{where}: the _id {row['_id']!r} is there twice")
            ids.add(row["_id"])
    if not ids:
        raise UserError(f"{path} has no rows")
    return digest.hexdigest()


def _first(rows: Sequence[Mapping[str, Any]], limit: int | None) -> Iterable[Mapping[str, Any]]:
    return (rows[i] for i in range(len(rows) if limit is None else min(limit, len(rows))))
