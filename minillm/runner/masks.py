"""Bit masks of allowed tokens, computed on the CPU while the device computes the logits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minillm import kernels
from minillm.grammar.matcher import Matcher
from minillm.runner.to_device import to_device
from minillm.sequence import Sequence, SequenceGroup


@dataclass(frozen=True)
class Masks:
    """Masks for some rows of logits.

    Attributes:
        rows: the rows of logits that have a mask.
        words: ``[masks, vocab // 32 + 1]`` int32 on the CPU, one mask for each of ``rows``. Bit ``i % 32`` of word
            ``i // 32`` is set if token ``i`` is allowed.
        empty: the rows of logits for which the request's parameters, together with its grammar, allow no token.
        forced: row -> token id, for sequences at their limit of reasoning tokens. The row allows only this token.
    """

    rows: list[int]
    words: Tensor
    empty: list[int]
    forced: dict[int, int] = field(default_factory=dict)

    def apply(self, logits: Tensor) -> None:
        """Set the logits of banned tokens to -inf, in place, in the rows of ``logits [n, vocab]`` that have a mask."""
        if self.rows:
            mask_rows = to_device(self.mask_rows(len(logits)), torch.int32, logits.device)
            kernels.mask_logits(logits, mask_rows, self.words.to(logits.device, non_blocking=True), logits)

    def mask_rows(self, count: int) -> list[int]:
        """Return for each of ``count`` rows of logits the index of its mask in ``words``, or -1 if it has none."""
        mask_rows = [-1] * count
        for number, row in enumerate(self.rows):
            mask_rows[row] = number
        return mask_rows


def masks_of(sequences: SequenceOf[tuple[SequenceGroup, Sequence]], vocab: int, device: torch.device) -> Masks:
    """Return the masks of the sequences that need one. Row i of the logits belongs to sequence i.

    With a grammar, end tokens are allowed only where the grammar is complete. Before ``min_tokens`` they are allowed
    only if no other token is. If a grammar fails, its sequence gets no mask, and its matcher has the error. If
    ``device``, where the logits are, is a GPU, the masks are in pinned memory.
    """
    owned = [
        (grammar_now(sequence), row, group, sequence)
        for row, (group, sequence) in enumerate(sequences)
        if needs_mask(group, sequence)
    ]
    if not owned:
        return Masks([], torch.empty(0, 0, dtype=torch.int32), [])
    # Grammars first. The library's threads take consecutive parts of the list. Copies of one matcher wait for each
    # other, so they are adjacent.
    owned.sort(key=lambda each: (each[0] is None, 0 if each[0] is None else id(each[0].family)))
    by_grammar = [(matcher, group, sequence) for matcher, _, group, sequence in owned if matcher is not None]
    there = torch.empty(len(owned), vocab // 32 + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
    words = there.numpy().view(np.uint32)
    _follow_grammars(by_grammar, words)
    words[len(by_grammar) :] = _all_tokens(vocab)
    kept, empty, forced = [], [], {}
    for number, (matcher, row, group, sequence) in enumerate(owned):
        if matcher is not None and matcher.error is not None:
            continue
        kept.append(number)
        if (only := _forced(sequence)) is not None:
            forced[row] = only
            words[number] = 0
            _set(words[number], [only], True)
            continue
        if matcher is not None and sequence.reasoning_position is not None:
            opening = sequence.reasoning_position.may_open(sequence.token_ids)
            _set(words[number], [] if opening is None else [opening], True)
        if _is_bounded(group, sequence):
            _exclude(words[number], group, sequence)
            if not words[number].any() and matcher is not None:
                _set(words[number], matcher.spellings(), True)
                _exclude(words[number], group, sequence)
            if not words[number].any():
                empty.append(row)
    rows = [owned[number][1] for number in kept]
    return Masks(rows, there if len(kept) == len(owned) else there[kept], empty, forced)


def grammar_now(sequence: Sequence) -> Matcher | None:
    """Return the grammar matcher for a sequence's next token. None without a grammar, or during its reasoning."""
    position, matcher = sequence.reasoning_position, sequence.matcher
    return None if matcher is None or (position is not None and position.is_inside(sequence.token_ids)) else matcher


def _forced(sequence: Sequence) -> int | None:
    """Return the only token that may come next if the reasoning has reached its limit, else None."""
    return None if sequence.reasoning_position is None else sequence.reasoning_position.forced(sequence.token_ids)


def needs_mask(group: SequenceGroup, sequence: Sequence) -> bool:
    """Return whether any token may be banned as the sequence's next token."""
    return sequence.matcher is not None or _is_bounded(group, sequence) or _forced(sequence) is not None


def needs_tokens(group: SequenceGroup, sequence: Sequence) -> bool:
    """Return whether only the CPU can compute the next draw's constraints, since they depend on earlier tokens."""
    params = group.params
    if sequence.matcher is not None or params.no_repeat_ngram_size or params.logits_processor is not None:
        return True
    position = sequence.reasoning_position
    if position is not None and position.num_free(sequence.token_ids) <= sequence.num_pending + 1:
        return True
    return any(len(word) > 1 for word in group.bad_words)


def is_early(group: SequenceGroup, sequence: Sequence) -> bool:
    """Return whether ``min_tokens`` forbids an end token as the next token."""
    return bool(group.end_ids) and sequence.num_tokens - sequence.num_prompt_tokens < group.params.min_tokens


def repeating_tokens(token_ids: list[int], size: int) -> list[int]:
    """Return the next tokens that would complete a repeated n-gram of ``size`` tokens."""
    if len(token_ids) < size:
        return []
    if size == 1:
        return list(dict.fromkeys(token_ids))
    starts, tail = range(len(token_ids) - size + 1), token_ids[len(token_ids) - size + 1 :]
    found = [i for i in starts if token_ids[i] == tail[0] and token_ids[i : i + size - 1] == tail]
    return [token_ids[i + size - 1] for i in found]


def completing_tokens(token_ids: list[int], words: tuple[tuple[int, ...], ...]) -> list[int]:
    """Return the next tokens that would complete one of ``words``, each given as a run of token ids."""
    return [word[-1] for word in words if len(word) == 1 or tuple(token_ids[1 - len(word) :]) == word[:-1]]


def bits_of(token_ids: list[int], vocab: int) -> NDArray[np.uint32]:
    """Return a mask ``[vocab // 32 + 1]`` uint32 with the bits of ``token_ids`` set."""
    bits = np.zeros((vocab // 32 + 1) * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@lru_cache(maxsize=1)
def _all_tokens(vocab: int) -> NDArray[np.uint32]:
    return bits_of(list(range(vocab)), vocab)


def _follow_grammars(owners: SequenceOf[tuple[Matcher, SequenceGroup, Sequence]], words: NDArray[np.uint32]) -> None:
    """Write a mask for each sequence to the first rows of ``words``: the tokens that its grammar allows next.

    If a grammar fails, its matcher records the error.
    """
    matchers = [matcher for matcher, _, _ in owners]
    if not matchers:
        return
    may_end = matchers[0].vocabulary.fill([matcher.state for matcher in matchers], words[: len(matchers)])
    for allowed, ends, (matcher, group, sequence) in zip(words, may_end, owners, strict=False):
        stops = bool(group.params.stop_token_ids)  # ids that may also be ordinary text in the grammar
        if stops:
            _set(allowed, group.end_ids, False)
            if not (ends or allowed.any()):
                _set(allowed, [each for each in matcher.spellings() if each not in group.end_ids], True)
        if ends and matcher.may_stop:
            if not (is_early(group, sequence) and allowed.any()):
                _set(allowed, group.end_ids, True)
        elif ends or (stops and not allowed.any()):
            matcher.note_error()


def _is_bounded(group: SequenceGroup, sequence: Sequence) -> bool:
    """Return whether a request's parameters, apart from its grammar, may ban a token."""
    if group.allowed is not None or group.bad_words or group.params.no_repeat_ngram_size:
        return True
    return _bars_end(group, sequence)


def _bars_end(group: SequenceGroup, sequence: Sequence) -> bool:
    """Return whether end tokens are banned by a rule other than the grammar.

    They are banned before ``min_tokens``, and during the reasoning before an answer with a grammar.
    """
    return grammar_now(sequence) is None and (is_early(group, sequence) or sequence.matcher is not None)


def _exclude(words: NDArray[np.uint32], group: SequenceGroup, sequence: Sequence) -> None:
    """Clear the bits of tokens that a request's parameters, apart from its grammar, exclude."""
    params = group.params
    if group.allowed is not None:
        words &= group.allowed
    banned = completing_tokens(sequence.token_ids, group.bad_words)
    if params.no_repeat_ngram_size:
        banned += repeating_tokens(sequence.token_ids, params.no_repeat_ngram_size)
    if _bars_end(group, sequence):
        banned += group.end_ids
    _set(words, banned, False)


def _set(words: NDArray[np.uint32], token_ids: SequenceOf[int], value: bool) -> None:
    for token_id in token_ids:
        bit = np.uint32(1 << (token_id % 32))
        words[token_id // 32] = words[token_id // 32] | bit if value else words[token_id // 32] & ~bit
