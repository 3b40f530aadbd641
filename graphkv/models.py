"""Model and tokenizer: a hub id, a local folder, the embedded default, or a tiny random model for tests."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from eval.errors import UserError
from graphkv import attention, embedded

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HASH_WHOLE_BELOW = 2 << 30  # bytes: larger weights are identified by their index, file names and sizes


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is loaded; the fields of `conf/model/*.yaml`.

    Parameters
    ----------
    name
        Label in results and tables; None takes the folder's name.
    family
        Whose cut lengths and templates a protocol applies; None if no protocol knows the model.
    source
        `embedded`, `tiny`, `local`, or a Hugging Face hub id.
    path
        A local folder to load instead of `source`.
    revision
        Commit of the hub repository.
    dtype
        `float32`, `bfloat16` or `float16`.
    device
        `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:N`, or `balanced` (spread over all GPUs).
    attention
        Attention back end of the prefill, a name that transformers knows.
    """

    name: str | None = "smollm2"
    family: str | None = "smollm2"
    source: str = "embedded"
    path: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be {', '.join(_DTYPES)}, not {self.dtype!r}")
        if self.attention not in ("sdpa", "flash_attention_2", "flash_attention_3"):
            raise ValueError(f"attention must be sdpa, flash_attention_2 or _3, not {self.attention!r}")
        if self.source == "local" and self.path is None:
            raise ValueError("path must name the model's folder when source is local")

    @property
    def label(self) -> str:
        """Name in results: `name`, or the folder's where a folder replaces an embedded model or none is given."""
        if self.path and (self.name is None or self.source in ("embedded", "tiny")):
            return Path(self.path).resolve().name
        return self.name or self.source.rsplit("/", 1)[-1]

    @property
    def known_family(self) -> str | None:
        """`family`, unless a folder replaces the embedded or the tiny model, of which then nothing is known."""
        return None if self.path and self.source in ("embedded", "tiny") else self.family


@dataclass(frozen=True)
class ModelInfo:
    """What can be said of a model without loading its weights.

    Attributes
    ----------
    config
        How it will be loaded.
    folder
        Where its files are; None for the tiny model, which has none.
    tokenizer
        Its tokenizer.
    max_positions
        Longest prompt plus answer in tokens.
    stop_ids
        Every id that ends an answer: generation config, tokenizer, and Llama-3's `<|eot_id|>`.
    """

    config: ModelConfig
    folder: Path | None
    tokenizer: PreTrainedTokenizerBase
    max_positions: int
    stop_ids: frozenset[int]

    @property
    def label(self) -> str:
        """The model's name in results."""
        return self.config.label

    @property
    def device(self) -> str:
        """`cpu`, `cuda`, …: where the model goes, `auto` resolved."""
        if self.config.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.config.device

    def check_device(self) -> None:
        """Refuse a GPU that this machine does not have; one that only prepares jobs for others need not have it."""
        if self.config.device not in ("auto", "cpu") and not torch.cuda.is_available():
            raise UserError(
                f"model.device={self.config.device} asks for a GPU, but torch sees none: use device=cpu or auto"
            )

    @cached_property
    def weights_hash(self) -> str:
        """sha256 that identifies the weights.

        Of the weight files where they are under 2 GiB, else of their index, names and sizes (a revision pins those).
        """
        if self.folder is None:
            return _hash_tensors(tiny_model())
        if (self.folder / embedded.HASH_FILE).is_file():
            return (self.folder / embedded.HASH_FILE).read_text().strip()
        files = sorted(self.folder.glob("*.safetensors"))
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        whole = sum(file.stat().st_size for file in files) < _HASH_WHOLE_BELOW
        for file in [*sorted(self.folder.glob("*.index.json")), *files]:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            if whole or file.suffix == ".json":
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, with what is known of it."""

    info: ModelInfo
    model: PreTrainedModel


def _hash_tensors(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def inspect(config: ModelConfig) -> ModelInfo:
    """Find a model and read everything but its weights; never runs remote code, never unpickles.

    Raises
    ------
    UserError
        If the model is not there (the message says what to download and where it was looked for), or if its
        attention back end is not.
    """
    if config.attention not in ALL_ATTENTION_FUNCTIONS:
        raise UserError(f"model.attention={config.attention} is not available in this transformers installation")
    if config.path is None and config.source == "tiny":
        return ModelInfo(config, None, byte_tokenizer(), _TINY["max_position_embeddings"], frozenset({257}))
    folder = _locate(config)
    try:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        generation = folder / "generation_config.json"
        eos = (GenerationConfig.from_pretrained(folder) if generation.is_file() else settings).eos_token_id
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} cannot be read as a model: {str(error).splitlines()[0]}") from error
    ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id, tokenizer.get_vocab().get("<|eot_id|>")}
    return ModelInfo(config, folder, tokenizer, settings.max_position_embeddings, frozenset(ids - {None}))


def load(info: ModelInfo) -> LoadedModel:
    """Load the weights, from safetensors alone, with graphkv attention.

    Raises
    ------
    UserError
        If there is no such device, the folder has no safetensors, or the model does not route attention through
        transformers' interface.
    """
    info.check_device()
    if info.folder is None:
        return LoadedModel(info, tiny_model(_DTYPES[info.config.dtype]).to(info.device))
    if not any(info.folder.glob("*.safetensors")):
        raise UserError(f"{info.folder} holds no .safetensors file, the only format of weights that is loaded")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            info.folder,
            dtype=_DTYPES[info.config.dtype],
            attn_implementation=attention.NAME,
            use_safetensors=True,
            device_map=info.device,
            local_files_only=True,
        ).eval()
    finally:
        if shown:
            logging.enable_progress_bar()
    if not model._supports_attention_backend:
        raise UserError(
            f"{type(model).__name__} does not route attention through transformers' AttentionInterface, "
            "so its cache cannot be recorded: choose another model"
        )
    return LoadedModel(info, model)


def _locate(config: ModelConfig) -> Path:
    """The folder that holds the weights, downloaded from the hub where it must be and can be."""
    if config.path is not None:
        folder = Path(config.path).expanduser()
        if not (folder / "config.json").is_file():
            raise UserError(f"model.path={config.path} holds no config.json: name a folder with a saved model")
        return folder
    if config.source == "embedded":
        return embedded.locate()
    from huggingface_hub import (
        constants,
        snapshot_download,
    )  # costs half a second that local models need not pay
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
    try:
        return Path(snapshot_download(config.source, revision=config.revision, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {config.revision}" if config.revision else ""
        raise UserError(
            f"the model {config.source}{at} is not in {constants.HF_HUB_CACHE} and could not be downloaded "
            f"({type(error).__name__}): run `hf download {config.source}` on a connected machine (gated models need "
            "`hf auth login`), or point model.path at a folder that holds it"
        ) from error


_TINY = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> LlamaForCausalLM:
    """A random Llama: 2 layers, 4 query and 2 KV heads of size 16, 4,096 positions, vocabulary of `byte_tokenizer`."""
    config = LlamaConfig(**_TINY, attn_implementation=attention.NAME)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:  # larger than the default initialisation, so that attention is not uniform
                torch.nn.init.normal_(parameter, std=0.15)
    return model.to(dtype).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (0–255, in the order of byte-level BPE), `<s>` 256, put before every text, and `</s>` 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(tokenizer_models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
