"""The tokens that grammars allow: masks of logits, computed on the host while the device computes the logits."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minillm.runner.to_device import to_device
from minillm.sequence import Sequence, SequenceGroup


@dataclass(frozen=True)
class Masks:
    """Masks for some rows of logits.

    Attributes:
        rows: the rows that have one.
        words: ``[rows, words]`` int32, on the host: bit ``i % 32`` of word ``i // 32`` tells whether token ``i`` may
            follow.
    """

    rows: list[int]
    words: Tensor

    def apply(self, logits: Tensor) -> None:
        """Set the ``[n, vocab]`` logits of tokens that may not follow to -inf, in place; other rows are not touched."""
        if not self.rows:
            return
        device = logits.device
        banned = _zero_bits(self.words, device)[:, : logits.shape[1]]
        if len(self.rows) == len(logits):
            logits.masked_fill_(banned, float("-inf"))
        else:
            at = to_device(self.rows, torch.int64, device)
            logits[at] = logits[at].masked_fill(banned, float("-inf"))


def masks_of(sequences: SequenceOf[tuple[SequenceGroup, Sequence]], device: torch.device) -> Masks:
    """The masks of those sequences that have a grammar; row i of the logits is that of sequence i.

    Tokens that end an answer may follow exactly where its text is complete, and not before ``min_tokens`` unless
    nothing else may. A sequence whose grammar fails has no mask; its matcher has the error. The
    masks of logits on a GPU, ``device``, go there without another copy.
    """
    constrained = [(row, *pair) for row, pair in enumerate(sequences) if pair[1].matcher is not None]
    matchers = [sequence.matcher for _, _, sequence in constrained if sequence.matcher is not None]
    if not matchers:
        return Masks([], torch.empty(0, 0, dtype=torch.int32))
    vocabulary = matchers[0].vocabulary
    there = torch.empty(len(matchers), vocabulary.num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
    words = there.numpy().view(np.uint32)
    words.fill(0)  # torch would do it in threads, which then spin where those of the masks should run
    vocabulary.fill([matcher.state for matcher in matchers], words)
    for allowed, (_, group, _) in zip(words, constrained, strict=True):
        _set(allowed, group.end_ids, False)
    has_any: list[bool] = np.logical_or.reduce(words, axis=1).tolist()
    kept = []
    for number, ((_, group, sequence), matcher) in enumerate(zip(constrained, matchers, strict=True)):
        early = sequence.num_output_tokens < group.params.min_tokens
        if matcher.may_stop and not (early and has_any[number]):
            _set(words[number], group.end_ids, True)
        elif not has_any[number]:
            matcher.note_error()
        if matcher.error is None:
            kept.append(number)
    rows = [constrained[number][0] for number in kept]
    return Masks(rows, there if len(kept) == len(matchers) else there[kept])


def _zero_bits(words: Tensor, device: torch.device) -> Tensor:
    """Whether each bit of ``[n, words]`` is 0, as ``[n, 32 * words]`` bool on the device."""
    if device.type == "cpu":  # twice as fast as shifts there
        return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")) == 0
    there = (words if words.is_pinned() or device.type != "cuda" else words.pin_memory()).to(device, non_blocking=True)
    bits = (there.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    return bits.flatten(1) == 0


def _set(words: NDArray[np.uint32], token_ids: SequenceOf[int], value: bool) -> None:
    for token_id in token_ids:
        bit = np.uint32(1 << (token_id % 32))
        words[token_id // 32] = words[token_id // 32] | bit if value else words[token_id // 32] & ~bit
