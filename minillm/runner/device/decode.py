"""Steps in which every sequence decodes: one CUDA graph from token ids to logits, one from logits to drawn tokens.

A graph of the forward pass is for one padded number of sequences, one width of the block tables, and one launch
configuration for shared blocks. A graph of the draw is for one padded number of sequences and one set of operations.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from minillm import kernels
from minillm.kernels import Plan, WorkList
from minillm.runner.device.ahead import Ahead, Shape
from minillm.runner.device.listed import LISTED, listed, num_listed, wants_logprobs
from minillm.runner.device.rows import padded_size
from minillm.runner.device.state import DeviceState, Found
from minillm.runner.device.work import DecodeWork
from minillm.runner.masks import Masks
from minillm.sequence import Chunk

_OFTEN = 32  # steps for which a larger graph is good enough


class DecodeSteps:
    """The forward pass and the draws of steps in which every sequence decodes."""

    def __init__(self, state: DeviceState, ahead: Ahead) -> None:
        self._ahead = ahead
        self._state, capacity, device = state, state.capacity, state.device
        self._masks = torch.zeros(capacity, state.vocab // 32 + 1, dtype=torch.int32, device=device)
        self._mask_rows = torch.zeros(capacity, dtype=torch.int32, device=device)  # of each row of logits
        self._work_list = WorkList.allocate(capacity, state.shape, device)
        self.forget()

    def forget(self) -> None:
        """Forget what the device knows about masks, because a step has failed."""
        self._sent_mask_rows: list[int] = []

    def compute(self, work: DecodeWork) -> None:
        """Compute a step's tokens, and write their logits to the state's ``logits``.

        Until the kernels that read shared blocks once are compiled, each sequence reads its own blocks.
        """
        state = self._state
        size = state.begin(work)
        shared = self.shared(work, size)
        if shared is not None:
            key, forward = (size, state.width, *shared.launch), partial(self.forward, size, state.width, shared)
        if shared is None or (state.forwards.lacks(key) and not self._ahead.is_compiled(forward, key)):
            blocks = state.blocks_for(size, work.longest)
            key, forward = (size, blocks, 0, 0), partial(self.forward, size, blocks, None)
        if not state.forwards.lacks(key):
            state.forwards.run(key, forward)
            return
        needed = -(-work.longest // state.block_size)
        larger = state.forwards.recorded(
            lambda each: len(each) == 4 and each[0] >= size and each[1] >= needed and each[2:] == (0, 0)
        )
        is_close = larger is not None and larger[0] <= 2 * size
        if self._ahead.record(partial(state.forwards.run, key, forward), forward, key, _OFTEN if is_close else 1):
            return
        if is_close:
            self._replay(larger, size)
        elif self._ahead.is_compiled(forward, key):
            forward()  # kernel by kernel
        else:
            self._by_others(larger, size, forward)

    def _by_others(self, larger: tuple[int, ...] | None, size: int, forward: Callable[[], None]) -> None:
        """Compute a step as part of a larger step, because the step's own kernels are not compiled.

        Use the graph ``larger`` of a step with more sequences, or the kernels for the maximum number of sequences. If
        neither exists, wait until the kernels of ``forward`` are compiled.
        """
        most, width = self._state.capacity, self._state.width
        if larger is not None:
            self._replay(larger, size)
            return
        widest = partial(self.forward, most, width, None)
        if self._ahead.is_compiled(widest, (most, width, 0, 0)):
            self._pad(size, most)
            widest()
        else:
            self._ahead.run_once(forward, forward)

    def _replay(self, key: tuple[int, ...], size: int) -> None:
        """Compute ``size`` sequences with graph ``key``, which was recorded for more sequences."""
        self._pad(size, key[0])
        self._state.forwards.run(key, lambda: None)

    def _pad(self, size: int, to: int) -> None:
        """Turn rows ``size`` to ``to`` (exclusive) into padding, for kernels that compute ``to`` sequences."""
        self._state.rows[size:to].fill_(-1)

    def shared(self, work: DecodeWork, size: int) -> WorkList | None:
        """Return the device's list of work for a step that reads shared blocks once. None if that saves no time."""
        if work.plan is not None:
            self._work_list = self._work_list.fill(Plan(*work.plan))
        return self._work_list.first(size) if work.shares_blocks else None

    def draw(self, draws: list[Chunk], masks: Masks) -> tuple[Found, bool]:
        """Draw from the state's logits. Return the results of all rows, and whether requests want log-probabilities."""
        state, vocab = self._state, self._state.vocab
        size, masked = state.size, bool(masks.rows)
        if masked:
            self._send(masks, [draw.row for draw in draws])
        penalized = any(draw.group.params.has_penalties for draw in draws)
        # If no request wants log-probabilities, they are only used to detect NaN.
        wanted = wants_logprobs(draws)
        raw_logprobs, count = (penalized or masked) and wanted, num_listed(draws, vocab) if wanted else 0
        work = partial(self.draw_rows, size, penalized=penalized, masked=masked, raw_logprobs=raw_logprobs, count=count)
        key = size, penalized, masked, raw_logprobs, count
        if state.draws.lacks(key):  # without this, it would be interrupted after it has changed the state
            self._ahead.run_once(partial(state.draws.record, key, work), work)
        found = state.draws.run(key, work)
        state.cpu_rows.note_drawn(draws)
        return found, wanted

    def _send(self, masks: Masks, rows: list[int]) -> None:
        """Send masks to the device.

        Args:
            masks: the masks of the draws. `Masks.rows` are indices of draws.
            rows: for each draw, its row of logits.
        """
        mask_rows = [-1] * self._state.size
        for row, mask_row in zip(rows, masks.mask_rows(len(rows)), strict=True):
            mask_rows[row] = mask_row
        if mask_rows != self._sent_mask_rows:
            self._mask_rows[: len(mask_rows)].copy_(self._state.numbers(mask_rows, torch.int32))
            self._sent_mask_rows = mask_rows
        self._masks[: len(masks.words)].copy_(masks.words, non_blocking=True)

    # --- prepared ahead -----------------------------------------------------------------------------------------------

    def shapes(self) -> Iterator[Shape]:
        """Yield the shapes of usual steps: first all draws without penalties and masks, then all forward passes.

        These forward passes do not read shared blocks once: see `shared_shapes`.
        """
        state = self._state
        for size in self.sizes():
            work = partial(self.draw_rows, size, penalized=False, masked=False, raw_logprobs=False, count=0)
            yield Shape(work, partial(state.draws.record, (size, False, False, False, 0), work))
        for size in self.sizes():
            for blocks in sorted({state.blocks_for(size, length) for length in self._lengths()}):
                forward = partial(self.forward, size, blocks, None)
                yield Shape(forward, partial(state.forwards.record, (size, blocks, 0, 0), forward))

    def first_shapes(self) -> Iterator[Shape]:
        """Yield the shapes that any step can use before other shapes are prepared.

        They are: a forward pass with the maximum number of sequences, to which smaller steps are padded; draws with and
        without penalties and masks; and draws that list the most probable tokens.
        """
        most = self._state.capacity
        yield Shape(partial(self.forward, most, self._state.width, None))
        for size in (1, most):
            for penalized in (False, True):
                for masked in (False, True):
                    ways = {"penalized": penalized, "masked": masked, "raw_logprobs": penalized or masked}
                    yield Shape(partial(self.draw_rows, size, **ways, count=0))
            for count in LISTED:
                if count <= self._state.vocab:
                    plain = {"penalized": False, "masked": False, "raw_logprobs": False}
                    yield Shape(partial(self.draw_rows, size, **plain, count=count))

    def shared_shapes(self) -> Iterator[Shape]:
        """Yield the shapes of forward passes that read each shared block once for all its sequences."""
        state = self._state
        for size in self.sizes():
            for shared in self.work_lists(size):
                forward = partial(self.forward, size, state.width, shared)
                key = (size, state.width, *shared.launch)
                yield Shape(forward, partial(self._record_shared, key, forward))

    def work_lists(self, size: int) -> Iterator[WorkList]:
        """Yield a work list for each possible `WorkList.launch` of ``size`` sequences. Yield none without sharing."""
        shape, longest = self._state.shape, self._state.width * self._state.block_size
        ways = {at_a_time for at_a_time, _ in shape.ways(size)} if self._state.cpu_rows.may_share else ()
        splits = {shape.tail_splits(size, tokens) for tokens in (0, longest)}
        for at_a_time, tail_splits in sorted((way, split) for way in ways for split in splits):
            yield replace(self._work_list.first(size), at_a_time=at_a_time, tail_splits=tail_splits)

    def _record_shared(self, key: tuple[int, ...], forward: Callable[[], None]) -> None:
        """Record a graph of a forward pass that reads shared blocks once. During recording, the plan is empty.

        The last plan may be for more sequences than ``forward`` computes, so recording cannot use it.
        """
        words = self._work_list.words
        kept = words.clone()
        words.zero_()
        try:
            self._state.forwards.record(key, forward)
        finally:
            words.copy_(kept)

    def sizes(self) -> list[int]:
        """Return all padded numbers of sequences."""
        return sorted({padded_size(n + 1) for n in range(len(self._state.words))} | {self._state.capacity})

    def _lengths(self) -> list[int]:
        longest = self._state.width * self._state.block_size
        return [*(1 << i for i in range(longest.bit_length())), longest]

    # --- recorded in graphs -------------------------------------------------------------------------------------------

    def forward(self, size: int, blocks: int, shared: WorkList | None) -> None:
        """Compute the tokens of the first ``size`` rows. This advances their positions, so a call cannot be repeated.

        ``blocks``: width of the block tables.
        """
        self._state.forward(self._state.gather(size), size, blocks, shared)

    def draw_rows(self, size: int, *, penalized: bool, masked: bool, raw_logprobs: bool, count: int) -> Found:
        """Draw from the first ``size`` rows of logits, and write the tokens to the sequences' rows of the state.

        Args:
            penalized, masked: apply penalties, masks.
            raw_logprobs: return log-probabilities from before penalties and masks.
            count: number of most probable tokens to list for each row.
        """
        state = self._state
        inputs, rows, raw = state.inputs.first(size), state.rows[:size], state.as_drawn_from(state.logits[:size])
        logits = raw
        if penalized:
            logits = torch.empty_like(raw, dtype=torch.float32)
            kernels.penalize(raw, state.words, state.counts, rows, logits)
        if masked:
            possible = torch.empty_like(logits) if logits is raw else logits
            kernels.mask_logits(logits, self._mask_rows[:size], self._masks, possible)
            logits = possible
        tokens, logprobs = kernels.sample_with_logprobs(logits, inputs.sampling)
        kernels.end_decode(state.words, state.counts, rows, tokens)
        return tokens, kernels.log_probabilities(raw, tokens) if raw_logprobs else logprobs, *listed(raw, count)
