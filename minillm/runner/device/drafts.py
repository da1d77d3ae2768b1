"""Steps with draft tokens: each token is computed as if it were the last token of a sequence of its own.

The tokens of one sequence have the same block table and different lengths. This works because a layer writes all K and
V before any token reads them. The CPU writes the tokens' rows for each step (`TokenRows`). Each pair (padded number of
tokens, width of the block tables) has a CUDA graph of the forward pass. Each pair (padded number of tokens, number of
most probable tokens to list) has a graph of the draw.
"""

from itertools import accumulate

import torch
from torch import Tensor

from minillm import kernels
from minillm.params import SamplingParams
from minillm.runner.device.listed import listed, num_listed, wants_logprobs
from minillm.runner.device.rows import padded_size, sampling_words
from minillm.runner.device.state import DeviceState, Found
from minillm.runner.drawn import Drawn
from minillm.runner.penalties import needs_processing
from minillm.runner.step import ChunkWork
from minillm.sequence import Chunk, Schedule, Sequence


class DraftSteps:
    """The forward pass and the draws of steps with draft tokens."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self.forget()

    def forget(self) -> None:
        """Discard the state of the last step."""
        self._sampling: list[dict[int, int]] = []  # for each chunk of the next step
        self._last: tuple[int, list[int]] | None = None  # padded number of the last step's rows, rows with logits

    def takes(self, schedule: Schedule) -> bool:
        """Return whether the step is short, with draft tokens but no prompts, and the CPU knows all its tokens."""
        if not schedule.extended or schedule.prefills:
            return False
        known = all(not (chunk.sequence.num_pending or chunk.group.device) for chunk in schedule.decodes)
        num_tokens = sum(len(chunk.token_ids) for chunk in schedule.chunks)
        return known and num_tokens <= len(self._state.tokens.rows)

    def prepare(self, schedule: Schedule) -> None:
        """Store the sampling parameters of the next step's chunks."""
        self._sampling = [_sampling(chunk) for chunk in schedule.chunks]

    def compute(self, chunks: list[ChunkWork], out: Tensor) -> Tensor:
        """Compute the chunks' tokens. Return the rows of logits that the chunks need.

        If the chunks need all rows, these are a view of the state's logits. Otherwise, they are copied to ``out``.
        """
        state = self._state
        ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
        wanted = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_logits, end)]
        size = padded_size(ends[-1])
        blocks = state.blocks_for(size, max(chunk.end for chunk in chunks))
        state.tokens.write(chunks, self._sampling or [{}] * len(chunks), size, blocks)
        self._sampling, self._last = [], (size, wanted)
        state.forwards.run((size, blocks, "each"), lambda: self._forward(size, blocks))
        if len(wanted) == ends[-1]:
            return state.logits[: len(wanted)]
        return out.copy_(state.logits[state.numbers(wanted, torch.int64)])

    def pass_over(self) -> None:
        """Record that the present step is of another kind, without draft tokens. `draw` then returns None."""
        self._last = None

    def draw(self, draws: list[Chunk], holders: list[Sequence]) -> Drawn | None:
        """Draw from the last step's logits. Return None if that step had no drafts, or if the logits need processing.

        Args:
            draws: one draw after each sequence's last token, and one after each draft token. The sequence in a draw is
                a copy that includes the draft tokens before the draw.
            holders: the original sequences, without draft tokens.
        """
        if self._last is None or any(needs_processing(draw.group, draw.sequence) for draw in draws):
            return None
        state = self._state
        state.cpu_rows.outdate(holders)  # these sequences have no penalties
        (size, wanted), count = self._last, num_listed(draws, state.vocab)
        found = state.draws.run((size, "each", count), lambda: self._draw(size, count))
        rows = [wanted[draw.row] for draw in draws]
        return state.drawn(draws, found, rows, wants_logprobs(draws), may_compute_ahead=False)

    # --- recorded in graphs -------------------------------------------------------------------------------------------

    def _forward(self, size: int, blocks: int) -> None:
        state = self._state
        inputs, words = state.inputs.first(size), state.tokens.words(size, blocks)
        inputs = inputs._replace(block_tables=inputs.block_tables[:, :blocks])
        kernels.begin_decode(words, state.tokens.rows[:size], state.block_size, inputs)
        state.forward(inputs, size, blocks, None)

    def _draw(self, size: int, count: int) -> Found:
        raw = self._state.as_drawn_from(self._state.logits[:size])
        sampling = self._state.inputs.first(size).sampling
        return *kernels.sample_with_logprobs(raw, sampling), *listed(raw, count)


def _sampling(chunk: Chunk) -> dict[int, int]:
    """Return a chunk's sampling parameters as words of its tokens' rows: a dictionary `Field` -> word.

    It is empty if the request does not sample.
    """
    params = chunk.group.params
    return sampling_words(params, chunk.sequence) if isinstance(params, SamplingParams) else {}
