"""Check the fields of a request, and turn them into fields of its group."""

from collections.abc import Sequence
from operator import countOf

from minillm.checks import shown
from minillm.errors import ContextLengthError, UsageError
from minillm.params import Params
from minillm.text.tokenizer import Tokenizer


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int, num_new: int = 1) -> None:
    """Raise UsageError unless a model with this vocabulary and context length can compute the prompt.

    The context must also have space for ``num_new`` tokens of an answer, 0 or 1.
    """
    if not token_ids:
        raise UsageError("the prompt is empty; give at least one token of text")
    # On a GPU an id out of range would break the CUDA context, not only this request. The loop finds the id for the
    # message. The two lines before it check a long prompt several times as fast.
    whole = countOf(map(type, token_ids), int) == len(token_ids)
    if not whole or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise UsageError(f"token id {shown(token_id)} in the prompt is not from 0 to {vocab_size - 1}")
    if len(token_ids) + num_new > max_model_len:
        found = f"the prompt has {len(token_ids)} tokens and the context holds {max_model_len}"
        found += ", one of them for the answer" * num_new
        raise ContextLengthError(f"{found}; shorten the prompt or raise max_model_len")


def bad_word_ids(params: Params, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return ``bad_words`` as banned runs of token ids. A text is banned both with and without a leading space.

    Raises:
        UsageError: a word is text and the model has no tokenizer, or a word has no tokens.
    """
    runs: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            runs[tuple(word)] = None
        elif tokenizer is None:
            raise UsageError("bad_words: this model has no tokenizer; give token ids instead of text")
        else:
            # A word of white space only, such as a line end, is banned unchanged.
            for text in (word.lstrip(), f" {word.lstrip()}") if word.strip() else (word,):
                runs[tuple(tokenizer.encode(text, add_special_tokens=False, continues=True))] = None
    if () in runs:
        raise UsageError("bad_words: one of the words has no tokens; leave it out")
    return tuple(runs)


def check_ids(params: Params, bad_words: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    """Raise UsageError if parameters name token ids outside the vocabulary, or ban every allowed token."""
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", [token_id for word in bad_words for token_id in word]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        if any(token_id >= vocab_size for token_id in ids):
            raise UsageError(f"{name}: token id {max(ids)} is not below the vocabulary's size {vocab_size}")
    never = {word[0] for word in bad_words if len(word) == 1}
    if params.allowed_token_ids is not None and never.issuperset(params.allowed_token_ids):
        raise UsageError("bad_words exclude every token of allowed_token_ids; allow one more")


def salt_for(salt: str | None, num_prompt_tokens: int, longest_plain: int | None) -> str | None:
    """Return the salt for a prompt's blocks, given the request's own. Only blocks of the same salt are shared.

    ``longest_plain``: with dynamic rope scaling, K of a longer prompt depends on its length. Then the salt includes the
    length. None for other models.
    """
    depends_on_length = longest_plain is not None and num_prompt_tokens > longest_plain
    return f"{num_prompt_tokens} tokens {salt or ''}" if depends_on_length else salt
