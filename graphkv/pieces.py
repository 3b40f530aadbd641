"""The text of each token of a prompt, so that all of them together are the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # bytes of a character in UTF-8, and so the tokens that it may be spread over


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """What each token adds to the decoded text.

    A token is decoded behind the one before it, because some tokenizers drop a leading blank. A character that is
    spread over several tokens belongs to the last of them, and the others get an empty text.

    Parameters
    ----------
    tokenizer
        Of the model.
    ids
        Prompt token ids, special tokens included.

    Returns
    -------
    list of str
        One text a token.
    """

    def decoded(begin: int, end: int) -> str:
        return tokenizer.decode(ids[begin:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts = []
    done = 0  # tokens before this one have their texts
    for i in range(len(ids)):
        begin = max(0, done - 1)
        text = decoded(begin, i + 1).removeprefix(decoded(begin, done))
        if text.endswith(_UNFINISHED) and i - done + 1 < _LONGEST and i + 1 < len(ids):
            texts.append("")
        else:
            texts.append(text)
            done = i + 1
    return texts


def span(texts: Sequence[str], passage: str) -> tuple[int, int] | None:
    """The tokens (first, one past the last) that hold the first occurrence of `passage`; None if there is none."""
    at = "".join(texts).find(passage)
    if at < 0 or not passage:
        return None
    ends = [0]
    for text in texts:
        ends.append(ends[-1] + len(text))
    first = next(i for i, end in enumerate(ends[1:]) if end > at)
    last = next(i for i, end in enumerate(ends[1:]) if end >= at + len(passage))
    return first, last + 1
