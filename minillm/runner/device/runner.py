"""A runner for GPUs: the state of decoding sequences stays on the device, and a decode step replays a CUDA graph.

Each sequence has a row of state, and the CPU sends only changes (`minillm.runner.device.rows`). A step is three
launches for a model of any depth: the list of rows (if it has changed), a graph from token ids to logits, and a graph
from logits to drawn tokens, which go back into the rows. The next step can be launched before the CPU has seen these
tokens. A graph is captured when a padded number of sequences first occurs. For few sequences there is also a graph for
each padded length of the longest one. Everything else, including shared blocks, is data.

There are four kinds of steps, each with its forward pass, draws and graphs in one file: `decode`, `mixed` (decodes and
prompts), `drafts` and short `prompts`. Other prompts are computed as in the base class. Up to a thousand tokens, most
work of mixed steps and of these prompts is also in graphs (`piecewise`). On-device beam searches (`beams`) continue a
decode step.

If several ranks share the model, rank 0 does the bookkeeping and draws. The other ranks have the same rows, get the
changes (`DecodeWork`) and replay their own graphs. Each step begins with a broadcast of token ids, inside the graph.
(If all ranks drew, all would need every request's parameters, and one differing bit would make them diverge for good.)
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from minillm import kernels
from minillm.cache import HostMoves
from minillm.kernels import Costs, WorkList
from minillm.model.llama import Batch, Llama
from minillm.model.shard import ranks_of
from minillm.runner.device.ahead import Ahead, Compiler, NoCompiler, Shape
from minillm.runner.device.beams import DeviceBeams
from minillm.runner.device.decode import DecodeSteps
from minillm.runner.device.drafts import DraftSteps
from minillm.runner.device.mixed import MixedSteps
from minillm.runner.device.piecewise import PiecewiseForward
from minillm.runner.device.prompts import ShortPrompts
from minillm.runner.device.state import DeviceState
from minillm.runner.drawn import Drawn
from minillm.runner.masks import masks_of
from minillm.runner.penalties import note_empty
from minillm.runner.runner import Runner
from minillm.runner.scores import ScoringForward
from minillm.runner.step import ChunkWork, StepWork
from minillm.sequence import Chunk, Schedule, Sequence

_REHEARSED = 37  # tokens of the rehearsed prompt: not a multiple of a block or tile size, like most prompts
_LEAST_FREE = 128 << 20  # bytes of the device: with less, no more graphs are recorded ahead
_LONG = 1024  # tokens of a prompt for which attention and matmuls have other kernels than for a short one


class DeviceRunner(Runner):
    """The model, its pool, the device state of decoding sequences, and one object for each kind of step.

    Args:
        max_num_seqs: number of rows of state.
        max_model_len: tokens of the longest sequence. A row has space for its block table.
        graphs: capture CUDA graphs. Otherwise the same operations run one by one.
        sharing: decides whether reading shared blocks once saves time. None: never do it.
        compiler: compiles kernels ahead. None: they compile at their first launch.
    """

    def __init__(
        self,
        model: Llama,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        max_num_seqs: int,
        max_model_len: int,
        graphs: bool,
        sharing: Costs | None,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(model, num_blocks, block_size, num_host_blocks)
        # Ranks must run the same steps in the same way, so they prepare nothing.
        prepares = (graphs or compiler is not None) and ranks_of(model) is None
        self.ahead = Ahead(compiler or NoCompiler(), prepares)
        self.state = state = DeviceState(
            model, self.kv_cache, block_size,
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, graphs=graphs, sharing=sharing,
        )  # fmt: skip
        self.prompts: ShortPrompts | None = None
        self.piecewise: PiecewiseForward | None = None
        if state.ranks is None:
            self.piecewise = PiecewiseForward(model, self.kv_cache, state.forwards, self.ahead)
            self.forward = ScoringForward(model, self.piecewise.hidden)
            self.prompts = ShortPrompts(
                model, self.kv_cache, block_size, state.forwards, self.ahead,
                max_num_seqs=max_num_seqs, width=state.width, logits=state.logits,
            )  # fmt: skip
        self.decode, self.drafts = DecodeSteps(state, self.ahead), DraftSteps(state)
        self.mixed = MixedSteps(state, self.decode)
        self.beams = DeviceBeams(
            state.words, self.kv_cache, block_size, state.capacity, state.vocab, state.ranks, graphs=graphs
        )
        self._decodes: list[Chunk] = []  # of the last step

    def work_for(self, schedule: Schedule, copies: list[tuple[int, int]]) -> StepWork:
        if self.drafts.takes(schedule):
            self._decodes = []
            self.drafts.prepare(schedule)
            chunks = [self.chunk_work(chunk) for chunk in schedule.chunks]
            return StepWork(schedule.moves, copies, None, chunks, len(chunks))
        self._decodes, prefills = schedule.decodes, schedule.prefills + schedule.extended
        decode = self.state.cpu_rows.work_for(schedule.decodes, joins=bool(prefills)) if schedule.decodes else None
        self.state.count_tokens()
        return StepWork(schedule.moves, copies, decode, [self.chunk_work(chunk) for chunk in prefills], 0)

    @torch.inference_mode()
    def compute(self, work: StepWork) -> Tensor:
        """Compute a step. Return logits ``[n, vocab]`` in the model's dtype, decoding sequences first."""
        self.ahead.search()  # for kernels of the last step, which the device may still compute
        self.ahead.count_step()
        self.prepare(work)
        self.drafts.pass_over()
        wanted = sum(chunk.num_logits for chunk in work.chunks) + (0 if work.decode is None else work.decode.num_seqs)
        logits = self.state.logits[:wanted]
        if wanted > len(logits):  # draft tokens come on top of the sequences
            logits = self.state.logits.new_empty(wanted, self.state.logits.shape[1])
        if work.num_decodes:
            return self.drafts.compute(work.chunks, logits)
        if work.decode is not None and work.decode.num_beams:
            self.beams.begin(work.decode.beam_rows)
        prompts = self.prompts if work.decode is None and work.chunks else None
        if prompts is not None and prompts.takes(work.chunks) and prompts.compute(work.chunks):
            pass  # a graph has computed these short prompts
        elif work.chunks:
            batch = self.batch(work.chunks, 0)
            if work.decode is not None:
                batch = self.mixed.batch(work.decode, batch)
            self._compute_batch(batch, work.chunks, logits)
        elif work.decode is not None:
            self.decode.compute(work.decode)
        if work.decode is not None and work.decode.num_beams:
            self.beams.run(logits, self.state.logits, self._decodes, self.state.cpu_rows)
        return logits

    @torch.inference_mode()
    def draw(self, logits: Tensor, draws: list[Chunk]) -> Drawn:
        owners = [(draw.group, draw.sequence) for draw in draws]
        masks = masks_of(owners, logits.shape[1], self.state.device)  # while the device still computes the logits
        note_empty(owners, masks)
        unusual = any(group.params.logit_bias or group.params.logits_processor is not None for group, _ in owners)
        if len(logits) > len(self._decodes) or unusual:
            return self.mixed.draw(logits, draws, masks, self._decodes)
        found, wanted = self.decode.draw(draws, masks)
        for observer in self.observers:
            observer.end()
        # Rows of logits of another decoding method may be in between.
        return self.state.drawn(draws, found, [draw.row for draw in draws], wanted, may_compute_ahead=True)

    @torch.inference_mode()
    def draw_each(self, draws: list[Chunk], holders: list[Sequence]) -> Drawn | None:
        """See `DraftSteps.draw`."""
        return self.drafts.draw(draws, holders)

    def _compute_batch(self, batch: Batch, chunks: list[ChunkWork], logits: Tensor) -> None:
        """Compute prompts and decoding sequences, and write their logits to ``logits``.

        If the kernels that read a shared block once for all its sequences are compiled, use these kernels.
        """

        def work(batch: Batch) -> tuple[Callable[[], object], Callable[[], object]]:
            forward = partial(self.forward, batch, chunks, batch.num_decodes, logits)
            return forward, partial(self.model.forward, batch, self.kv_cache, logits)

        if batch.shared is not None:
            key = "shared", batch.num_decodes, *batch.shared.launch
            if self.ahead.attempt(*work(batch), key) is not None:
                return
            batch = replace(batch, shared=None)
        self.ahead.run(*work(batch))

    @property
    def prepared(self) -> tuple[int, int]:
        return self.ahead.progress

    @torch.inference_mode()
    def prepare_ahead(self) -> bool:
        device = self.state.device
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _LEAST_FREE:
            self.ahead.stop()
        try:
            if self.ahead.advance(self.shapes):
                return True
        except torch.OutOfMemoryError:  # other programs took the memory: compute short prompts like long ones
            self.prompts = self.piecewise = None
            self.forward = ScoringForward(self.model, partial(self.model.hidden, kv_cache=self.kv_cache))
        except Exception as error:  # steps still run, and report it if the device has failed
            warnings.warn(f"steps are no longer prepared ahead: {type(error).__name__}: {error}", stacklevel=2)
        return super().prepare_ahead()

    def shapes(self) -> Iterator[Shape]:
        """Yield the shapes of steps to prepare, the most urgent first."""
        yield from self.first_shapes()
        yield from self.decode.shapes()
        if self.prompts is not None:
            yield from self.prompts.shapes()
        if self.piecewise is not None:
            yield from self.piecewise.shapes()
        yield from self.decode.shared_shapes()
        yield from (Shape(partial(self._mixed, *each)) for each in self._mixtures())
        yield from self.beams.shapes(self.state.logits)

    def first_shapes(self) -> Iterator[Shape]:
        """Yield the shapes of steps that any number of requests may need right after the start."""
        yield from self.decode.first_shapes()
        row = torch.zeros(2, self.state.vocab, device=self.state.device)
        words, counts, rows = self.state.words, self.state.counts, self.state.rows[:2]
        yield Shape(lambda: kernels.penalize(row, words, counts, rows, row))
        yield Shape(partial(self.host_pool.carry_out, HostMoves(), [(0, 0)]))
        for lengths in ([_REHEARSED] * 2, [_LONG], [_LONG] * 2):
            yield Shape(partial(self._mixed, 0, lengths, None))
        for size in self._mixed_sizes():
            yield Shape(partial(self._mixed, size, [_REHEARSED], None))

    def _mixtures(self) -> Iterator[tuple[int, list[int], WorkList | None]]:
        """Yield mixed steps, each as a tuple (number of decoding sequences, prompt lengths, work list or None).

        The work list says how the decoding sequences read shared blocks; None: each sequence reads its own.
        """
        for size in self._mixed_sizes():
            for shared in (None, *self.decode.work_lists(size)):
                yield size, [_LONG], shared
        for count in (16, 257):
            yield 0, [1] * count, None

    def _mixed_sizes(self) -> list[int]:
        """Return the padded numbers of decoding sequences with which a step still has a row for a prompt."""
        return [size for size in self.decode.sizes() if size < self.state.capacity]

    def _mixed(self, num_decodes: int, lengths: list[int], shared: WorkList | None) -> None:
        """Launch the kernels of a step of ``num_decodes`` sequences and prompts of ``lengths``, all with zeros."""
        prefill = self.batch([self._chunk(length) for length in lengths], 0)
        self.model.forward(self.mixed.padding(num_decodes, prefill, shared), self.kv_cache)

    def _chunk(self, length: int) -> ChunkWork:
        return ChunkWork([0] * length, 0, [0] * -(-length // self.block_size), length, 1)

    def give_up(self, sequences: list[Sequence]) -> None:
        self.state.cpu_rows.give_up(sequences)

    def rehearsals(self) -> list[Callable[[], object]]:
        """Return functions that run the kernels of a first request, so that threads can compile these in parallel.

        The functions compute with zeros, and their results are not used.
        """
        chunk = self._chunk(_REHEARSED)
        row = torch.zeros(1, self.state.vocab, dtype=self.model.dtype, device=self.state.device)
        return [
            lambda: self.compute(StepWork(HostMoves(), [], None, [chunk], 0)),
            lambda: self._mixed(0, [_LONG], None),
            lambda: self.decode.forward(1, self.state.blocks_for(1, _REHEARSED), None),
            lambda: self.decode.draw_rows(1, penalized=False, masked=False, raw_logprobs=False, count=0),
            lambda: kernels.log_probabilities(row, row.argmax(-1)),
        ]

    def forget(self) -> None:
        super().forget()
        self.state.cpu_rows.forget()
        for kind in (self.decode, self.drafts, self.beams):
            kind.forget()

    def close(self) -> None:
        super().close()
        self.ahead.close()
        self.state.close()
        self.beams.close()
