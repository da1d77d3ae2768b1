"""Steps in which every sequence decodes: one CUDA graph from token ids to logits, one from logits to drawn tokens.

A graph of the forward pass is for one padded number of sequences, one width of the block tables, and one launch
configuration for shared blocks. A graph of the draw is for one padded number of sequences and one set of operations.
"""

from functools import partial

import torch

from minillm import kernels
from minillm.kernels import Plan, WorkList
from minillm.runner.device.listed import listed, num_listed, wants_logprobs
from minillm.runner.device.state import DeviceState, Found
from minillm.runner.device.work import DecodeWork
from minillm.runner.masks import Masks
from minillm.sequence import Chunk


class DecodeSteps:
    """The forward pass and the draws of steps in which every sequence decodes."""

    def __init__(self, state: DeviceState) -> None:
        self._state, capacity, device = state, state.capacity, state.device
        self._masks = torch.zeros(capacity, state.vocab // 32 + 1, dtype=torch.int32, device=device)
        self._mask_places = torch.zeros(capacity, dtype=torch.int32, device=device)  # of each row of logits
        self._work_list = WorkList.allocate(capacity, state.shape, device)
        self.forget()

    def forget(self) -> None:
        """Forget what the device knows about masks, because a step has failed."""
        self._told_places: list[int] = []

    def compute(self, work: DecodeWork) -> None:
        """Compute a step's tokens, and write their logits to the state's ``logits``."""
        state = self._state
        size = state.begin(work)
        shared = self.shared(work, size)
        blocks = state.width if shared is not None else state.blocks_for(size, work.longest)
        launch = (0, 0) if shared is None else shared.launch
        state.forwards.run((size, blocks, *launch), lambda: self.forward(size, blocks, shared))

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
        told, count = (penalized or masked) and wanted, num_listed(draws, vocab) if wanted else 0
        work = partial(self.draw_rows, size, penalized=penalized, masked=masked, told=told, count=count)
        found = state.draws.run((size, penalized, masked, told, count), work)
        state.books.note_drawn(draws)
        return found, wanted

    def _send(self, masks: Masks, rows: list[int]) -> None:
        """Send masks to the device. ``masks`` numbers the draws; ``rows[i]`` is the row of logits for draw i."""
        places = [-1] * self._state.size
        for row, place in zip(rows, masks.places(len(rows)), strict=True):
            places[row] = place
        if places != self._told_places:
            self._mask_places[: len(places)].copy_(self._state.numbers(places, torch.int32))
            self._told_places = places
        self._masks[: len(masks.words)].copy_(masks.words, non_blocking=True)

    # --- recorded in graphs -------------------------------------------------------------------------------------------

    def forward(self, size: int, blocks: int, shared: WorkList | None) -> None:
        """Compute the tokens of the first ``size`` rows. ``blocks``: width of the block tables."""
        self._state.forward(self._state.gather(size), size, blocks, shared)

    def draw_rows(self, size: int, *, penalized: bool, masked: bool, told: bool, count: int) -> Found:
        """Draw from the first ``size`` rows of logits, and write the tokens to the sequences' rows of the state.

        Args:
            penalized, masked: apply penalties, masks.
            told: return log-probabilities from before penalties and masks.
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
            kernels.mask_logits(logits, self._mask_places[:size], self._masks, possible)
            logits = possible
        tokens, logprobs = kernels.sample_with_logprobs(logits, inputs.sampling)
        kernels.end_decode(state.words, state.counts, rows, tokens)
        return tokens, kernels.log_probabilities(raw, tokens) if told else logprobs, *listed(raw, count)
