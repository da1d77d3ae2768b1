"""Admission: check that the model can run a request, and predict how many blocks the request needs.

A group (the sequences of one request) is admitted if the pool has blocks for its prompt, and for the predicted peak of
all running groups, as in LightLLM's router. The peak is at a moment when some sequence reaches its maximum length. If
this sequence has n tokens left now, every sequence that still runs at that moment has grown by n tokens.
"""

from collections.abc import Sequence
from operator import countOf

from minillm.cache import BlockManager
from minillm.checks import shown
from minillm.errors import CapacityError, ContextLengthError, UsageError
from minillm.params import Params
from minillm.sequence import SequenceGroup, Stage
from minillm.text.tokenizer import Tokenizer


def blocks_at_most(group: SequenceGroup, block_size: int) -> int:
    """Return the number of blocks that a group holds if all its sequences reach their maximum length."""
    shared = group.num_prompt_tokens // block_size
    longest = group.num_prompt_tokens + group.max_tokens
    return shared + group.params.num_sequences * (-(-longest // block_size) - shared)


def check_capacity(group: SequenceGroup, max_num_seqs: int, cache: BlockManager, num_pinned: int) -> None:
    """Raise CapacityError for a group that could never run, even alone."""
    n, size = group.params.num_sequences, cache.block_size
    if n > max_num_seqs:
        raise CapacityError(
            f"the request needs {n} sequences at a time (n, beam_width or depths), and max_num_seqs is {max_num_seqs}: "
            "ask for fewer, or raise max_num_seqs"
        )
    needed = blocks_at_most(group, size)
    if needed > cache.num_blocks - num_pinned:
        kept = f", {num_pinned} of them pinned" if num_pinned else ""
        raise CapacityError(
            f"the request can grow to {needed} blocks of {size} tokens ({group.num_prompt_tokens} prompt tokens, "
            f"{n} x {group.max_tokens} new ones) and the cache has {cache.num_blocks}{kept}; "
            "lower max_tokens, ask for fewer sequences, or start with more blocks"
        )


def blocks_to_finish_prompt(group: SequenceGroup, block_size: int) -> int:
    """Return the number of blocks for a group's tokens so far and one new token for each of its sequences."""
    shared = group.num_prompt_tokens // block_size
    lengths = [len(sequence.token_ids) for sequence in group.unfinished]
    lengths += [group.num_prompt_tokens] * (group.num_seqs - len(lengths))
    new = min(1, group.max_tokens)
    return shared + sum(-(-(length + new) // block_size) - shared for length in lengths)


def blocks_promised(group: SequenceGroup, block_size: int) -> int:
    """Return the number of blocks that a running group still needs to finish its prompt."""
    prompt = group.num_prompt_tokens if group.stage is Stage.PROMPT else 0
    if all((prompt or sequence.num_tokens) - sequence.num_computed <= 1 for sequence in group.computing):
        return 0
    tables = [sequence.table for sequence in group.sequences if sequence.table is not None]
    held = len(tables[0].blocks) if len(tables) == 1 else len({b for table in tables for b in table.blocks})
    return max(0, blocks_to_finish_prompt(group, block_size) - held)


def peak_fits(group: SequenceGroup, running: Sequence[SequenceGroup], cache: BlockManager, num_pinned: int) -> bool:
    """Return whether the pool can hold the predicted peak of the running groups together with ``group``.

    The prediction assumes that all sequences reach their maximum lengths, which is rare. So while more than half of the
    pool is free, the prediction is skipped and the result is True.
    """
    if not running or 2 * cache.num_free > cache.num_blocks:
        return True
    ahead = []  # (tokens still to generate, tokens generated) of every sequence
    shared = 0
    for each in (*running, group):
        shared += each.num_prompt_tokens
        sequences = each.unfinished
        for i in range(each.num_seqs):
            output = sequences[i].num_output_tokens if i < len(sequences) else 0
            ahead.append((each.max_tokens - output, output))
    ahead.sort(reverse=True)
    peak = held = 0
    for number, (left, own) in enumerate(ahead, 1):
        held += own
        peak = max(peak, held + number * left)
    return -(-(shared + peak) // cache.block_size) <= cache.num_blocks - num_pinned


def is_being_computed(
    group: SequenceGroup, prompt: list[int], known: int, running: Sequence[SequenceGroup], block_size: int
) -> bool:
    """Return whether a running group with an equal prefix is computing the next block that ``prompt`` needs.

    If so, admission waits until the prefix cache has the block. ``known``: prompt tokens that already have K and V.
    """
    end = known + block_size
    if end >= len(prompt):
        return False
    for other in running:
        sequence = other.sequences[0]
        theirs = sequence.token_ids
        # Most prompts differ in the first token of that block, so it is compared first.
        if len(theirs) < end or theirs[known] != prompt[known] or other.salt != group.salt:
            continue
        computing = sequence.num_computed < min(sequence.num_prompt_tokens, len(theirs) - 1)
        if computing and theirs[known:end] == prompt[known:end] and theirs[:known] == prompt[:known]:
            return True
    return False


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
