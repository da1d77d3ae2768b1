"""Checks of a request against its model: token ids, lengths, words."""

from __future__ import annotations

from collections.abc import Sequence
from operator import countOf

from minillm.checks import shown
from minillm.errors import UsageError
from minillm.params import Params
from minillm.text.tokenizer import Tokenizer


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raise UsageError unless the prompt can be computed by a model with this vocabulary and context."""
    if not token_ids:
        raise UsageError("the prompt is empty; give at least one token of text")
    # On a GPU an id out of range would destroy the whole context, not only this request. The loop finds the one to
    # name; the lines above it look at long prompts several times as fast.
    whole = countOf(map(type, token_ids), int) == len(token_ids)
    if not whole or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise UsageError(f"token id {shown(token_id)} in the prompt is not from 0 to {vocab_size - 1}")
    if len(token_ids) >= max_model_len:
        raise UsageError(
            f"the prompt has {len(token_ids)} tokens and the context holds {max_model_len}, "
            "one of them for the answer; shorten the prompt or raise max_model_len"
        )


def bad_word_ids(params: Params, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The runs of token ids that must not be generated; a text at the start of a line and within one."""
    runs: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            runs[tuple(word)] = None
        elif tokenizer is None:
            raise UsageError("bad_words: this model has no tokenizer; give token ids instead of text")
        else:
            for text in (word.lstrip(), f" {word.lstrip()}"):
                runs[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(runs)


def check_ids(params: Params, bad_words: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    """Raise UsageError where parameters name token ids beyond the vocabulary."""
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", [token_id for word in bad_words for token_id in word]),
    ):
        if any(token_id >= vocab_size for token_id in ids):
            raise UsageError(f"{name}: token id {max(ids)} is not below the vocabulary's size {vocab_size}")
