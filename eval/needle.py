"""Needle in a haystack: one sentence hidden in a long text at a chosen depth, and a question about it.

The test is Greg Kamradt's; lengths, depths and two of the scores follow KVCache-Factory, on which the paper's
Fig. 4 builds. Three things are stricter here. A prompt has *exactly* the tokens that its length says, with
template, question and BOS. The needle never splits a sentence: ends of sentences are found in the text, not
among token ids. And the needle stands in the prompt exactly once.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.errors import UserError
from eval.needles import NEEDLES, SCORES, Needle
from eval.samples import Encoded, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HAYSTACK = Path(__file__).parent / "data" / "haystack"

# What follows the text, and what a prompt without a chat template ends with: both are part of `data_hash`.
INSTRUCTION = "\n\nQuestion: {question} Answer with the sentence from the text."
PLAIN_CUE = "\nAnswer:"

_MARK = "@@CONTENT@@"

# A stop (no initial's, no title's), closing quotes, then no lower-case letter; or the end of a paragraph.
_SENTENCE_END = re.compile(
    r"(?<!\b[A-Z])(?<!\b[DM]r)(?<!\bSt)(?<!\bMrs)[.!?…][\"'”’)\]]*(?=\s+[^\sa-z])|\S(?=[^\S\n]*\n[^\S\n]*\n)"
)


@dataclass(frozen=True)
class NeedleConfig:
    """The fields of `conf/task/needle.yaml`, with the same defaults.

    Attributes
    ----------
    name
        Name of the task in tables; samples are called `<name>-<needle>-<length>-<depth>`.
    lengths
        Prompt lengths in tokens of the model's tokenizer; template, question and BOS are included.
    depths
        Where the needle stands, in percent of the haystack: 0 is before it, 100 directly before the question.
    needles
        Names out of `NEEDLES`, or "all".
    haystack
        Folder whose .txt files are read recursively, sorted by path; None is the packaged text.
    seed
        None keeps the order of the files; an integer shuffles it.
    max_new_tokens
        Longest answer in tokens.
    score
        The score that is drawn: overlap, rouge1 or contains. All three are stored.
    chat
        "auto" uses the tokenizer's chat template if it has one, True demands it, False writes plain text.
    stop
        Whether the model's stop tokens end an answer; False writes `max_new_tokens` whatever comes, for timing.

    Raises
    ------
    UserError
        If a field has no sense; the sentence names the field and what is allowed.
    """

    name: str = "needle"
    lengths: Sequence[int] = (1000, 2000, 3000)
    depths: Sequence[float] = (0, 25, 50, 75, 100)
    needles: Sequence[str] | str = ("dolores",)
    haystack: str | None = None
    seed: int | None = None
    max_new_tokens: int = 30
    score: str = "overlap"
    chat: bool | str = "auto"
    stop: bool = True

    def __post_init__(self) -> None:
        _require(bool(self.name) and isinstance(self.name, str), "name", self.name, "a word")
        _require_list("lengths", self.lengths, lambda x: _is_int(x) and x > 0, "positive whole numbers of tokens")
        _require_list("depths", self.depths, lambda x: _is_number(x) and 0 <= x <= 100, "percentages from 0 to 100")
        if self.needles != "all":
            allowed = f"names out of {', '.join(NEEDLES)}; or the word all"
            _require_list("needles", self.needles, lambda x: isinstance(x, str) and x in NEEDLES, allowed)
        _require(
            self.haystack is None or isinstance(self.haystack, str | Path),
            "haystack",
            self.haystack,
            "null or a folder",
        )
        _require(self.seed is None or _is_int(self.seed), "seed", self.seed, "null or a whole number")
        tokens = self.max_new_tokens
        _require(_is_int(tokens) and tokens > 0, "max_new_tokens", tokens, "a positive whole number")
        known = isinstance(self.score, str) and self.score in SCORES
        _require(known, "score", self.score, f"one of {', '.join(SCORES)}")
        _require(isinstance(self.chat, bool) or self.chat == "auto", "chat", self.chat, "auto, true or false")
        _require(isinstance(self.stop, bool), "stop", self.stop, "true or false")

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> NeedleConfig:
        """The configuration of a plain dict; absent fields take their defaults, unknown ones are refused."""
        allowed = [field.name for field in fields(cls)]
        unknown = sorted(str(key) for key in config if key not in allowed)
        if unknown:
            raise UserError(f"task needle: unknown field {', '.join(unknown)}; allowed are {', '.join(allowed)}.")
        return cls(**config)


def _require(condition: bool, field: str, value: object, allowed: str) -> None:
    if not condition:
        raise UserError(f"task needle: {field} is {value!r}, but must be {allowed}.")


def _require_list(field: str, values: object, valid: Callable[[Any], bool], allowed: str) -> None:
    """Refuse what is no list, an empty one, a bad element, or one given twice (sample ids would collide)."""
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    _require(is_list and len(values) > 0, field, values, f"a list of {allowed}")
    for value in values:
        _require(valid(value), field, value, f"a list of {allowed}")
        _require(values.count(value) == 1, field, value, "free of repetitions")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_haystack(folder: str | Path | None = None, seed: int | None = None) -> str:
    """The text of all .txt files below `folder`, paragraphs and files separated by a blank line.

    Parameters
    ----------
    folder
        Read recursively, sorted by path: the same text on every machine. None is the packaged one.
    seed
        Shuffles the order of the files, not what is in them; None keeps it.

    Raises
    ------
    UserError
        If the folder is missing, holds no text, or a file is not UTF-8.
    """
    root = HAYSTACK if folder is None else Path(folder)
    if not root.is_dir():
        raise UserError(f"task needle: haystack is {str(root)!r}, but must be null or an existing folder.")
    paths = sorted(root.rglob("*.txt"), key=lambda path: path.relative_to(root).as_posix())
    if seed is not None:
        random.Random(seed).shuffle(paths)
    texts = [_read(path) for path in paths]
    if not any(texts):
        raise UserError(f"task needle: the haystack folder {str(root)!r} has no .txt file with text in it.")
    return "".join(f"{text}\n\n" for text in texts if text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"task needle: the haystack file {str(path)!r} is not UTF-8 (byte {error.start}).") from None


@dataclass(frozen=True)
class _Forms:
    """Token ids that depend on the needle: itself, as its neighbours demand it, and the end of the prompt.

    Attributes
    ----------
    inline
        " needle", for a place where the haystack goes on with a blank.
    opening
        "needle" and a blank line, for the beginning of the text or after a token that ends in a blank.
    closing
        "needle" alone, after such a token and directly before the question.
    suffix
        Blank line, instruction and the end of the template.
    """

    inline: list[int]
    opening: list[int]
    closing: list[int]
    suffix: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest form of the needle."""
        return max(len(self.inline), len(self.opening), len(self.closing))

    @property
    def shortest(self) -> int:
        """Tokens of the shortest form of the needle."""
        return min(len(self.inline), len(self.opening), len(self.closing))


class NeedleTask:
    """The grid lengths × depths × needles as samples; a `Task` of `eval.samples`.

    The haystack is tokenised once. A prompt takes as many of its first tokens as the length leaves room for;
    a haystack that is too short is repeated from its beginning. The needle goes to the token at `depth`
    percent, moved back to the end of a sentence; at depth 0 it is a paragraph of its own before the text. At
    depth 100 the question follows it at once: there the stretch of haystack is shifted by less than a
    sentence, so that it ends with a whole one, and may begin within one.

    Parameters
    ----------
    config
        What to build.
    tokenizer
        A fast `transformers` tokenizer: ends of sentences need its offsets.
    max_positions
        Longest prompt plus answer of the model, in tokens; None does not check.
    limit
        Leave only the first so many samples.

    Raises
    ------
    UserError
        If the tokenizer is slow, lacks a demanded template or cannot give the needle back; if the haystack is
        unusable; or if a length has no room for template, needle and question, or exceeds the model's.
    """

    def __init__(
        self,
        config: NeedleConfig,
        tokenizer: PreTrainedTokenizerFast,
        max_positions: int | None = None,
        limit: int | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError("task needle: the tokenizer is a slow one, but must be fast (a tokenizer.json).")
        names = list(NEEDLES) if config.needles == "all" else list(config.needles)
        text = read_haystack(config.haystack, config.seed)
        _refuse_needles_in(text)

        self.name = config.name
        self.measure = "answer"
        self.main_score = config.score
        self.data_hash = _sha256([text, [asdict(NEEDLES[n]) for n in names], INSTRUCTION, PLAIN_CUE, config.seed])
        self.facts = {"data_hash": self.data_hash, "needles": names}
        self.identity = {
            config.name: {
                "data": self.data_hash,
                "max_new_tokens": config.max_new_tokens,
                "chat": tokenizer.chat_template if config.chat else None,
                **({} if config.stop else {"stop": False}),
            }
        }
        self._tokenizer = tokenizer
        self._stop_ids = None if config.stop else ()
        self._prefix, suffix_text = _frame(tokenizer, config.chat)
        self._forms = {name: _forms(tokenizer, NEEDLES[name], suffix_text) for name in names}
        self._check_lengths(config, max_positions)
        self._haystack, self._cuts = _tokenise(tokenizer, text, max(config.lengths))

        haystack_hash = _sha256(text)[:16]
        self.samples: list[Sample] = [
            self._sample(name, length, depth, config.max_new_tokens, haystack_hash)
            for length in config.lengths
            for depth in config.depths
            for name in names
        ][:limit]

    def encode(self, sample: Sample) -> Encoded:
        """Token ids of `sample`: assembled anew, as those of a whole grid would fill the memory."""
        ids, _ = self._assemble(sample.meta["needle"], sample.meta["length"], sample.meta["depth"])
        return Encoded(ids=tuple(ids), n_raw=len(ids), stop_ids=self._stop_ids)

    def text(self, ids: Sequence[int]) -> str:
        """Text of generated ids without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def score(self, sample: Sample, text: str) -> dict[str, float]:
        """Every score of the answer `text`; see `eval.needles`."""
        needle = NEEDLES[sample.meta["needle"]]
        return {name: function(text, needle) for name, function in SCORES.items()}

    def _check_lengths(self, config: NeedleConfig, max_positions: int | None) -> None:
        smallest = len(self._prefix) + max(forms.longest + len(forms.suffix) for forms in self._forms.values())
        if min(config.lengths) < smallest:
            raise UserError(
                f"task needle: length {min(config.lengths)} has no room for template, needle and question; "
                f"the smallest possible length is {smallest} tokens."
            )
        if max_positions is not None and max(config.lengths) + config.max_new_tokens > max_positions:
            raise UserError(
                f"task needle: length {max(config.lengths)} with an answer of {config.max_new_tokens} tokens "
                f"exceeds the {max_positions} positions of the model; the largest possible length is "
                f"{max_positions - config.max_new_tokens} tokens."
            )

    def _sample(self, name: str, length: int, depth: float, max_new_tokens: int, haystack: str) -> Sample:
        needle = NEEDLES[name]
        ids, actual_depth = self._assemble(name, length, depth)
        prompt = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if prompt.count(needle.text) != 1:
            raise UserError(
                f"task needle: the tokenizer does not give the needle {name!r} back letter by letter, "
                "but must decode to the text that it encoded."
            )
        return Sample(
            id=f"{self.name}-{name}-{length}-{depth:.10g}",
            task=self.name,
            prompt=prompt,
            references=(needle.answer,),
            max_new_tokens=max_new_tokens,
            meta={
                "length": length,
                "depth": depth,
                "actual_depth": actual_depth,
                "needle": name,
                "answer": needle.answer,
                "haystack": haystack,
            },
        )

    def _assemble(self, name: str, length: int, depth: float) -> tuple[list[int], float]:
        """The ids of a prompt, and the percentage of its haystack tokens that precede the needle."""
        forms, hay, cuts = self._forms[name], self._haystack, self._cuts
        room = length - len(self._prefix) - len(forms.suffix)  # haystack and needle
        last = depth == 100
        # The form depends on the cut, and n on the form. The bounds below break the circle: with any form,
        # cut <= n, or n <= cut where the haystack has to end at the cut.
        if last:
            cut = cuts[bisect_left(cuts, room - forms.shortest)]
        else:
            cut = cuts[bisect_right(cuts, (room - forms.longest) * depth / 100) - 1]
        if cut > 0 and not self._ends_blank(hay[cut - 1]):
            needle = forms.inline
        else:
            needle = forms.closing if last else forms.opening
        n = room - len(needle)
        start = cut - n if last else 0
        ids = self._prefix + hay[start:cut] + needle + hay[cut : start + n] + forms.suffix
        return ids, (100 * (cut - start) / n if n else float(depth))

    def _ends_blank(self, token: int) -> bool:
        """Whether the text of a token ends in white space (".\\n\\n" is one token in large vocabularies)."""
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)[-1:].isspace()


def build(
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    max_positions: int | None = None,
    limit: int | None = None,
) -> NeedleTask:
    """The needle task of a resolved `conf/task/needle.yaml`; see `NeedleConfig` and `NeedleTask`."""
    return NeedleTask(NeedleConfig.from_mapping(config), tokenizer, max_positions, limit)


def _refuse_needles_in(haystack: str) -> None:
    plain = " ".join(haystack.lower().split())
    for name, needle in NEEDLES.items():
        if " ".join(needle.text.lower().split()) in plain:
            raise UserError(f"task needle: the haystack already contains the needle {name!r}; use another text.")


def _frame(tokenizer: PreTrainedTokenizerFast, chat: bool | str) -> tuple[list[int], str]:
    """What stands before and after the user's content: ids with the BOS of model or template, and text."""
    if chat is True and not tokenizer.chat_template:
        raise UserError("task needle: chat is true, but the tokenizer has no chat template; use auto or false.")
    if not chat or not tokenizer.chat_template:
        return _added_bos(tokenizer), PLAIN_CUE

    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    if rendered.count(_MARK) != 1:
        raise UserError("task needle: the chat template does not show the user's content exactly once; set chat=false.")
    before, after = rendered.split(_MARK)
    ids = _ids(tokenizer, before)
    # Some templates open every turn with the BOS (SmolLM2): one BOS means no more than the template writes.
    bos = tokenizer.bos_token
    if bos is not None:
        written, found = before.count(bos), ids.count(tokenizer.bos_token_id)
        if written != found or ids[:2] == 2 * [tokenizer.bos_token_id]:
            raise UserError(
                f"task needle: the prompt would begin with a stray BOS; the chat template writes {bos!r} "
                f"{written} times before the content, and the tokenizer makes {found} of it; set chat=false."
            )
    return ids, after


def _added_bos(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The BOS that the tokenizer itself puts before a text, or nothing."""
    plain, special = _ids(tokenizer, "a"), tokenizer("a", add_special_tokens=True).input_ids
    return special[:1] if special[:1] == [tokenizer.bos_token_id] != plain[:1] else []


def _forms(tokenizer: PreTrainedTokenizerFast, needle: Needle, suffix: str) -> _Forms:
    return _Forms(
        inline=_ids_within(tokenizer, f" {needle.text}"),
        opening=_ids(tokenizer, f"{needle.text}\n\n"),
        closing=_ids(tokenizer, needle.text),
        suffix=_ids_within(tokenizer, INSTRUCTION.format(question=needle.question) + suffix),
    )


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _ids_within(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of `text`, which begins with white space, as they are inside a longer text.

    SentencePiece tokenizers put a blank of their own before a text; behind a letter they do not.
    """
    return _ids(tokenizer, f"a{text}")[len(_ids(tokenizer, "a")) :]


def _tokenise(tokenizer: PreTrainedTokenizerFast, text: str, n_min: int) -> tuple[list[int], list[int]]:
    """Ids of the haystack, repeated to more than `n_min`, and the ascending indices where a needle can stand.

    Such a cut is 0 or lies between the last token of a sentence and the next token. A sentence that ends
    inside a token gives no cut, unless all that the token adds to it is white space.
    """
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = encoding.input_ids, np.array(encoding.offset_mapping)
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    strays = sorted(special[i] for i in special.keys() & set(ids))
    if strays:
        raise UserError(f"task needle: the haystack contains the special tokens {', '.join(strays)} of the tokenizer.")

    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    cuts = [
        int(index)
        for end, index in zip(ends, np.searchsorted(offsets[:, 0], ends), strict=True)
        if not text[end : offsets[index - 1, 1]].strip()
    ]
    copies = n_min // len(ids) + 1
    return ids * copies, sorted({len(ids) * copy + cut for copy in range(copies) for cut in [0, *cuts]})


def _sha256(data: object) -> str:
    return hashlib.sha256(json.dumps(data, ensure_ascii=False).encode()).hexdigest()
