"""The official LongBench prompts: which text a row becomes, and how long its answer may be.

The templates are not stored here. They are read at run time from the `lm_eval` package
(`tasks/longbench/*.yaml`), brought back to the official wording where the package's differs in white space,
and compared with the sha256 of the official file. A score means something only if the prompt is the official
one to the last byte, so a mismatch is an error.

Source of hashes and lengths: THUDM/LongBench at 2e00731f8d0bff23dc4325161044d0ed8af94c1e,
`LongBench/config/dataset2prompt.json` and `dataset2maxlen.json` (MIT).
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from eval.errors import UserError
from eval.metrics import LONGBENCH, LONGBENCH_E

MAX_NEW_TOKENS: Mapping[str, int] = {
    "narrativeqa": 128,
    "qasper": 128,
    "multifieldqa_en": 64,
    "hotpotqa": 32,
    "2wikimqa": 32,
    "musique": 32,
    "gov_report": 512,
    "qmsum": 512,
    "multi_news": 512,
    "trec": 64,
    "triviaqa": 32,
    "samsum": 128,
    "passage_count": 32,
    "passage_retrieval_en": 32,
    "lcc": 64,
    "repobench-p": 64,
}
"""Longest answer of each task, in tokens of the model at hand."""

SHA256: Mapping[str, str] = {
    "narrativeqa": "aada7ed24b06abace5b0045ac3bcfe06fc831a6cf434f0ecfd99fb7b3d299e1c",
    "qasper": "0fbdd123fe7f83d6d6a9c583ca28cb29d68e523bf8fec01a0cf2dcd11037775d",
    "multifieldqa_en": "20b4666a2de8a1f701bdb6c4e015fa9f8758d64b361d841f7766df6c9ceba770",
    "hotpotqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "2wikimqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "musique": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "gov_report": "91c25d585b189ced91c9280efcb4ecb5dcff9548cd4e3bfae66c68025b569e95",
    "qmsum": "dca23b678fe0183bbd9555b57947022aed1b85739da5ad7e1b4708dd0c71c409",
    "multi_news": "2af3f28c40b902e6535d4910510d51653613c49de9b2fc287c5958395061101d",
    "trec": "0eff8bebdba99d91e9d7d91b6ab39455ac74648bea92c9255c9f68c62175b2db",
    "triviaqa": "00a802e6377e72fca39b169cf6c28893bedf23ba7286b03ecd15867c3e27a7c4",
    "samsum": "a68d884234907eefcaa0eacf7b2997f60fa46603988dceae6a44f9b49f045b3f",
    "passage_count": "986550b6c61009c629a4535766d94b7b51e2b2b9e1ed169e4ecb54417466e964",
    "passage_retrieval_en": "39b96b7fa52bdd2aa2bde34ea199158505201b9a0a2c3ce94e80249293f60431",
    "lcc": "6a1f24cf0bb83cd90f1fca8f0dd24801626c2aaea29db834ddc83b950e71190e",
    "repobench-p": "ee9ec182ea5ffeb70a7140d55baea97264a8612d88226d323afa90859c36240c",
}
"""sha256 of each official template, placeholders `{context}` and `{input}` included (UTF-8)."""

# (end of the packaged template, end of the official one): lm_eval lost white space in six of them.
_TAILS: Mapping[str, tuple[str, str]] = {
    "triviaqa": ("{context}\n{input}", "{context}\n\n{input}"),
    "samsum": ("{context}\n{input}", "{context}\n\n{input}"),
    "passage_count": ("The final answer is:", "The final answer is: "),
    "passage_retrieval_en": ("The answer is:", "The answer is: "),
    "lcc": ("Next line of code:", "Next line of code:\n"),
    "repobench-p": ("Next line of code:", "Next line of code:\n"),
}


class _Loader(yaml.SafeLoader):
    """YAML without code: `!function metrics.…` becomes nothing."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def base(task: str) -> str:
    """Name of the task whose prompt, metric and answer length `task` uses: itself without `_e`.

    Raises
    ------
    UserError
        Neither a task of LongBench nor one of LongBench-E.
    """
    if task not in LONGBENCH + LONGBENCH_E:
        raise UserError(
            f"unknown LongBench task {task!r}: allowed are {', '.join(LONGBENCH)}, "
            f"and with _e all of them but narrativeqa, musique and qmsum"
        )
    return task.removesuffix("_e")


@cache
def template(task: str) -> str:
    """Official template of a task, with the placeholders `{context}` and `{input}` of `str.format`.

    Raises
    ------
    UserError
        Unknown task, no `lm_eval` package, or a package whose template is not the official one.
    """
    name = base(task)
    path = _folder() / f"{name}.yaml"
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        packaged = str(config["doc_to_text"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"no LongBench template in {path}: install lm_eval==0.4.13 ({error!r})") from error
    text = packaged.replace("{{context}}", "{context}").replace("{{question}}", "{input}")
    if name in _TAILS:
        theirs, official = _TAILS[name]
        text = text.removesuffix(theirs) + official
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != SHA256[name]:
        raise UserError(
            f"the template of {name} in {path} is not LongBench's (sha256 {found[:12]}…, "
            f"expected {SHA256[name][:12]}…): install lm_eval==0.4.13"
        )
    return text


def fill(task: str, row: Mapping[str, Any]) -> str:
    """Prompt of a row: the official template with the row's `context` and `input`."""
    return template(task).format(context=row["context"], input=row["input"])


def _folder() -> Path:
    """Folder of lm_eval's LongBench tasks: the package is located, not imported."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the LongBench templates come from the lm_eval package: install lm_eval==0.4.13")
    return Path(spec.submodule_search_locations[0]) / "tasks" / "longbench"
