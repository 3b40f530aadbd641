"""How a prompt is cut, wrapped and stopped: the facts in which harnesses differ, and what follows from them.

A protocol is a file of facts in `conf/protocol/`, each with its source. The same predictions of the same
model move by several points between two of them, so the protocol's name belongs to every result. The model
family comes from the configuration (`model.family`), never from a path.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from eval.errors import UserError
from eval.metrics import LONGBENCH
from eval.samples import Encoded, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OTHERWISE = "otherwise"
"""Key of a mapping that stands for every family or task without an entry of its own."""

_CHOICES = {
    "overflow": ("fit", "extend"),
    "order": ("after", "before"),
    "stop": ("model", "eos"),
    "similarity": ("difflib", "levenshtein"),
}


@dataclass(frozen=True)
class ProtocolProfile:
    """The facts of one protocol.

    Attributes
    ----------
    name
        Name in results and tables.
    cut
        Model family → longest prompt in tokens, BOS counted. A family without an entry gets the positions of
        its model minus the new tokens of the task, the chat template included (`cut_from: positions` in the
        notes).
    overflow
        What happens where prompt and new tokens exceed the model's positions in spite of `cut`: `fit` cuts
        further until they do not, `extend` lets a listed family run past them, as the published code does.
        Both are noted.
    chat
        Model family → `none`, `model` (the tokenizer's chat template, if it has one), or a text with
        `{prompt}`.
    order
        Whether the chat format is put around the prompt `after` the cut or `before` it.
    exempt
        Tasks whose prompts get no chat format.
    stop
        `model`: every token that ends an answer of the model; `eos`: the tokenizer's eos token alone.
    stop_tokens
        Tokens that stop besides, by their text; ignored where the vocabulary does not have them.
    stop_texts
        Task → text whose last token stops the answers of this task.
    min_new_tokens
        Task → number of tokens before which no stop token is allowed.
    clean_up
        Model families whose decoded text loses the blanks before punctuation, as their tokenizers did before
        transformers 5.
    similarity
        Back end of the edit similarity: `difflib` or `levenshtein`.
    """

    name: str
    cut: Mapping[str, int]
    overflow: str
    chat: Mapping[str, str]
    order: str
    exempt: tuple[str, ...]
    stop: str
    stop_tokens: tuple[str, ...]
    stop_texts: Mapping[str, str]
    min_new_tokens: Mapping[str, int]
    clean_up: tuple[str, ...]
    similarity: str

    def chat_format(self, task: str, family: str | None) -> str:
        """`none`, `model`, or the text with `{prompt}` that a prompt of `task` is wrapped in."""
        if _base(task) in self.exempt:
            return "none"
        return _look_up(self.chat, family)


def parse(config: Mapping[str, Any]) -> ProtocolProfile:
    """Profile of a protocol file.

    Parameters
    ----------
    config
        The file's keys and values: exactly the fields of `ProtocolProfile`.

    Raises
    ------
    UserError
        A key is missing or unknown, or a value is not one that the field allows.
    """
    known = {field.name: field.type for field in fields(ProtocolProfile)}
    where = f"protocol {config.get('name')!r}"
    if unknown := sorted(set(config) - set(known)):
        raise UserError(f"{where}: unknown key {unknown[0]!r}, allowed are {', '.join(known)}")
    if missing := [key for key in known if key not in config]:
        raise UserError(f"{where}: the key {missing[0]!r} is missing")
    values = {key: _typed(config[key], known[key], f"{where}: {key}") for key in known}
    for key, allowed in _CHOICES.items():
        if values[key] not in allowed:
            raise UserError(f"{where}: {key} is {values[key]!r}, allowed are {', '.join(allowed)}")
    for key in ("chat", "min_new_tokens"):
        if OTHERWISE not in values[key]:
            raise UserError(f"{where}: {key} has no entry {OTHERWISE!r}")
    for family, text in values["chat"].items():
        if text not in ("none", "model") and text.count("{prompt}") != 1:
            raise UserError(
                f"{where}: chat.{family} is {text!r}, allowed are none, model, or a text with {{prompt}} once"
            )
    for key in ("exempt", "stop_texts", "min_new_tokens"):
        for task in values[key]:
            if task not in LONGBENCH and (key, task) != ("min_new_tokens", OTHERWISE):
                raise UserError(f"{where}: {key} names {task!r}, allowed are {', '.join(LONGBENCH)}")
    for key, least in (("cut", 2), ("min_new_tokens", 0)):
        for entry, number in values[key].items():
            if number < least:
                raise UserError(f"{where}: {key}.{entry} is {number}, the least allowed is {least}")
    return ProtocolProfile(**values)


def encode(
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    profile: ProtocolProfile,
    family: str | None,
    max_positions: int,
    model_stop_ids: Collection[int] = (),
) -> Encoded:
    """Token ids of a sample under a protocol.

    The cut is LongBench's: of a prompt of more than `cut` tokens the first and the last `cut // 2` stay,
    special tokens included in the count; both halves are decoded without special tokens, joined, and
    tokenised again. So the instruction at both ends survives, and the length may differ from `cut` by a few
    tokens. Begins with BOS exactly once where the tokenizer or the chat format has one, whichever of the two
    writes it.

    Parameters
    ----------
    sample
        Prompt, task and answer length.
    tokenizer
        Tokenizer of the model.
    profile
        The protocol.
    family
        Model family, for the profile's `cut` and `chat`; None for a model that no profile knows.
    max_positions
        Positions of the model, in tokens.
    model_stop_ids
        What ends an answer of the model, for profiles with `stop: model`.

    Returns
    -------
    Encoded
        `n_raw` is the length in tokens of the text that the cut looks at. `notes` has `cut` (longest prompt in
        tokens that was applied), `cut_from` (`protocol`, or `positions` where the family has no entry or the
        entry did not fit), `chat` (`none`, `model` or `protocol`) and `overflow` (tokens by which prompt and
        new tokens exceed `max_positions`; more than 0 only under `overflow: extend`).

    Raises
    ------
    UserError
        `max_positions` has no room for the new tokens and the chat format.
    """
    chat = profile.chat_format(sample.task, family)
    if chat == "model" and not tokenizer.chat_template:
        chat = "none"
    text = _wrap(sample.prompt, chat, tokenizer) if profile.order == "before" else sample.prompt
    raw = _tokenize(text, tokenizer)

    def encoded(cut: int) -> list[int]:
        if len(raw) > cut:
            half = cut // 2
            short = decode(raw[:half], tokenizer, profile, family) + decode(raw[-half:], tokenizer, profile, family)
        elif profile.order == "before" or chat == "none":
            return raw
        else:
            short = text
        return _tokenize(short if profile.order == "before" else _wrap(short, chat, tokenizer), tokenizer)

    listed = profile.cut.get(family)
    cut = max_positions - sample.max_new_tokens if listed is None else listed
    cut_from = "positions" if listed is None else "protocol"
    ids = encoded(cut) if cut >= 2 else raw
    while (excess := len(ids) + sample.max_new_tokens - max_positions) > 0:
        if listed is not None and profile.overflow == "extend":
            break
        cut, cut_from = min(cut, len(raw)) - excess, "positions"
        if cut < 2:
            raise UserError(
                f"a model of {max_positions} positions has no room for a prompt of {sample.task} with its "
                f"chat format and {sample.max_new_tokens} new tokens: use a model with more positions"
            )
        ids = encoded(cut)

    task = _base(sample.task)
    stops = set(stop_ids(profile, tokenizer, model_stop_ids))
    if task in profile.stop_texts:
        stops.add(tokenizer.encode(profile.stop_texts[task], add_special_tokens=False)[-1])
    notes = {
        "cut": cut,
        "cut_from": cut_from,
        "chat": chat if chat in ("none", "model") else "protocol",
        "overflow": max(excess, 0),
    }
    return Encoded(
        ids=tuple(ids),
        n_raw=len(raw),
        truncated=len(raw) > cut,
        stop_ids=tuple(sorted(stops)),
        min_new_tokens=_look_up(profile.min_new_tokens, task),
        notes=notes,
    )


def stop_ids(
    profile: ProtocolProfile, tokenizer: PreTrainedTokenizerBase, model_ids: Collection[int]
) -> frozenset[int]:
    """Stop tokens of every sample under a protocol, before those of its task.

    Parameters
    ----------
    profile
        The protocol.
    tokenizer
        Tokenizer of the model.
    model_ids
        The eos ids of the model's generation config.
    """
    ids = {tokenizer.eos_token_id}
    if profile.stop == "model":
        ids.update(model_ids)
    vocabulary = tokenizer.get_vocab() if profile.stop_tokens else {}
    ids.update(vocabulary.get(token) for token in profile.stop_tokens)
    return frozenset(ids - {None})


def decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, profile: ProtocolProfile, family: str | None) -> str:
    """Text of token ids, special tokens left out, not stripped: what prediction files hold."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.clean_up_tokenization(text) if family in profile.clean_up else text


def _wrap(prompt: str, chat: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if chat == "none":
        return prompt
    if chat == "model":
        turns = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return chat.replace("{prompt}", prompt)


def _tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids with special tokens; a BOS that the text begins with is not put before it a second time."""
    written = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not written, verbose=False).input_ids


def _base(task: str) -> str:
    return task.removesuffix("_e")


def _look_up(table: Mapping[str, Any], key: str | None) -> Any:
    return table.get(key, table[OTHERWISE])


def _typed(value: Any, kind: str, where: str) -> Any:
    """`value` as plain data of the field type `kind` (the annotation's text)."""
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "tuple[str, ...]" and isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(item, str) for item in value):
            return tuple(value)
    if kind.startswith("Mapping") and isinstance(value, Mapping):
        item = int if kind == "Mapping[str, int]" else str
        if all(isinstance(k, str) and type(v) is item for k, v in value.items()):
            return dict(value)
    raise UserError(f"{where} is {value!r}, expected {kind}")
