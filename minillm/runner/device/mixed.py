"""Mixed steps: decoding sequences and chunks of prompts in one batch, so that weights are read once for both.

Their draws run without a CUDA graph, and so do draws with logit biases or the caller's logits processor.
"""

import torch
from torch import Tensor

from minillm import kernels
from minillm.kernels import WorkList
from minillm.model.llama import Batch
from minillm.runner.device.decode import DecodeSteps
from minillm.runner.device.state import DeviceState, runs_ahead
from minillm.runner.device.work import DecodeWork
from minillm.runner.drawn import Drawn
from minillm.runner.masks import Masks
from minillm.runner.penalties import run_processors
from minillm.runner.sampler import draw_tokens
from minillm.sequence import Chunk


class MixedSteps:
    """The batch and the draws of mixed steps."""

    def __init__(self, state: DeviceState, decode: DecodeSteps) -> None:
        self._state, self._decode = state, decode

    def batch(self, work: DecodeWork, prefill: Batch) -> Batch:
        """Return one batch: first the decoding sequences, then the chunks of prompts in ``prefill``."""
        state, n, p = self._state, work.num_seqs, prefill.context_lens.shape[0]
        state.gather(state.begin(work))
        inputs = state.inputs.first(n + p)
        inputs.block_tables[n:, : prefill.block_tables.shape[1]] = prefill.block_tables
        inputs.context_lens[n:] = prefill.context_lens
        logit_rows = torch.arange(n, device=state.device)
        if prefill.logit_rows is not None:
            logit_rows = torch.cat((logit_rows, prefill.logit_rows + n))
        return Batch(
            token_ids=torch.cat((inputs.token_ids[:n], prefill.token_ids)),
            positions=torch.cat((inputs.positions[:n], prefill.positions)),
            slot_mapping=torch.cat((inputs.slot_mapping[:n], prefill.slot_mapping)),
            block_tables=inputs.block_tables,
            context_lens=inputs.context_lens,
            num_decodes=n,
            cu_seqlens=prefill.cu_seqlens,
            shared=self._decode.shared(work, n),
            logit_rows=logit_rows,
        )

    def padding(self, n: int, prefill: Batch, shared: WorkList | None) -> Batch:
        """Return a batch of zeros for a step of ``n`` decoding sequences and the prompts in ``prefill``.

        Its tensors have the same shapes as the tensors that `batch` returns. The batch is used to launch kernels before
        real steps need them.
        """
        tokens, inputs = n + prefill.token_ids.shape[0], self._state.inputs.first(n + prefill.context_lens.shape[0])
        numbers = torch.zeros(tokens, dtype=torch.int64, device=self._state.device)
        is_alone = not n  # then `Runner.batch` has made the tensors
        return Batch(
            token_ids=numbers,
            positions=numbers,
            slot_mapping=numbers - 1,
            block_tables=prefill.block_tables if is_alone else inputs.block_tables,
            context_lens=prefill.context_lens if is_alone else inputs.context_lens,
            num_decodes=n,
            cu_seqlens=prefill.cu_seqlens,
            shared=shared,
            logit_rows=numbers[: n + 1],
        )

    def draw(self, logits: Tensor, draws: list[Chunk], masks: Masks, decodes: list[Chunk]) -> Drawn:
        """Draw from any rows of logits, without a graph. ``decodes``: the step's decoding sequences."""
        state = self._state
        rows = state.cpu_rows.rows_for(draws, decodes)
        state.count_tokens()
        state.change(*state.cpu_rows.take_changes())
        raw = processed = state.as_drawn_from(logits[state.numbers([draw.row for draw in draws], torch.int64)])
        indices = state.numbers([row.index for row in rows], torch.int32)
        params = [draw.group.params for draw in draws]
        if masks.rows or any(p.has_penalties or p.logit_bias or p.logits_processor is not None for p in params):
            processed = raw.to(torch.float32, copy=True)
            biases = [(row, bias) for row, p in enumerate(params) for bias in (p.logit_bias or {}).items()]
            if biases:
                at = state.numbers([row * raw.shape[1] + token_id for row, (token_id, _) in biases], torch.int64)
                processed.view(-1).index_add_(0, at, state.numbers([bias for _, (_, bias) in biases], torch.float32))
            if any(p.has_penalties for p in params):
                kernels.penalize(processed, state.words, state.counts, indices, processed)
            masks.apply(processed)
            run_processors(processed, [(draw.group, draw.sequence) for draw in draws], masks)
        tokens = draw_tokens(processed, draws)
        kernels.end_decode(state.words, state.counts, indices, tokens)
        state.cpu_rows.note_drawn(draws)
        logprobs = kernels.log_probabilities(raw, tokens)
        return Drawn(draws, tokens, logprobs, raw, may_run_ahead=runs_ahead(draws), may_compute_ahead=True)
