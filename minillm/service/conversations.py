"""The engine's side: reads commands from stdin, writes events to stdout, computes in between.

Run as ``python -m minillm.service.conversations``. It ends when stdin does, so it never outlives the app.
"""

from __future__ import annotations

import io
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING

from minillm.engine import held
from minillm.engine.driver import Driver
from minillm.engine.idle import shared_length
from minillm.errors import MinillmError, UsageError
from minillm.runs import common_length
from minillm.service.cache_view import CacheView, Owner
from minillm.service.messages import (
    Abort,
    BeamsChanged,
    BeamView,
    Command,
    ContextFull,
    Drop,
    Event,
    Finished,
    Forget,
    Generate,
    Inspect,
    Keep,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    Notice,
    Pace,
    Pin,
    Report,
    RequestFailed,
    Started,
    Stepped,
    StepView,
    TextDelta,
    TokenChoice,
    decode,
    encode,
)

if TYPE_CHECKING:
    from minillm.engine.engine import Engine
    from minillm.outputs import CompletionOutput, Delta, RequestOutput, TokenLogprobs
    from minillm.params import Params
    from minillm.sequence import Sequence, SequenceGroup

_INTERVAL = 0.1  # seconds between two pictures of the pool, and of the beams, unless `Report` says otherwise
_MOST_STEPS = 100  # that one message tells


@dataclass
class Answer:
    """A request under way."""

    command: Generate
    group: SequenceGroup
    in_reasoning: bool
    started: bool = False
    beams_told_at: float = 0.0
    kept: bool = True  # its blocks stay when it ends

    @property
    def searches(self) -> bool:
        """Whether it is a beam search."""
        return "beam_width" in self.command.params


@dataclass
class KeptAnswer:
    """A finished request whose blocks stay: one idle sequence, or as many as it has candidates."""

    conversation: str
    sequences: list[Sequence]
    outputs: list[CompletionOutput]


@dataclass
class Conversations:
    """Drives one engine for the app: answers to conversations, whose blocks stay so that branches can begin there."""

    engine: Engine
    send: Callable[[Event], None]
    answers: dict[str, Answer] = field(default_factory=dict)
    kept: dict[str, KeptAnswer] = field(default_factory=dict)  # by request

    def __post_init__(self) -> None:
        self._view = CacheView(self.engine)
        self._driver = Driver(self.engine)
        self._interval = _INTERVAL
        self._text_interval = 0.0
        self._last_picture = self._last_text = 0.0
        self._untold: dict[tuple[str, int], list[TextDelta]] = {}  # by request and completion
        self._steps: list[StepView] = []
        self._pause = 0.0  # seconds from one step to the next, at least
        self._next_step = 0.0
        self._pinning: tuple[SequenceGroup, int] | None = None  # a prefix being computed, and its length
        self._pinned: Sequence | None = None

    def handle(self, command: Command) -> None:
        if isinstance(command, Generate):
            try:
                self._generate(command)
            except MinillmError as error:
                self.send(RequestFailed(command.request_id, str(error)))
        elif isinstance(command, Abort):
            self.engine.abort(command.request_id)
        elif isinstance(command, Keep):
            self._keep_only(command)
        elif isinstance(command, Drop):
            self._drop(command.request_id)
        elif isinstance(command, Forget):
            conversations = {name: answer.command.conversation for name, answer in self.answers.items()}
            conversations |= {name: kept.conversation for name, kept in self.kept.items()}
            for name, conversation in conversations.items():
                if conversation == command.conversation:
                    self._drop(name)
        elif isinstance(command, Pin):
            try:
                self._pin(command.system)
            except MinillmError as error:
                self.send(Notice(f"the system prompt is not pinned: {error}"))
        elif isinstance(command, Pace):
            self._pause = 1 / command.steps_per_second if command.steps_per_second > 0 else 0.0
        elif isinstance(command, Report):
            self._interval = self._text_interval = command.every
        elif isinstance(command, Inspect) and 0 <= command.block < self.engine.cache.num_blocks:
            self.send(self._view.facts(command.block))

    # --- answers ------------------------------------------------------------------------------------------------------

    def _generate(self, command: Generate) -> None:
        from minillm.params import BeamSearchParams, SamplingParams

        engine = self.engine
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise UsageError("this model has no chat template, so it cannot chat; use an instruct model")
        if any(answer.command.conversation == command.conversation for answer in self.answers.values()):
            raise UsageError("an answer of this conversation is still being generated; stop it first")
        kind = BeamSearchParams if "beam_width" in command.params else SamplingParams
        params: Params = kind.from_mapping(command.params)
        token_ids = engine.tokenizer.apply_chat_template(
            command.messages,
            add_generation_prompt=not command.continues,
            continue_final_message=command.continues,
        )
        if len(token_ids) + command.room > engine.max_model_len:
            self.send(ContextFull(command.request_id, len(token_ids), engine.max_model_len))
            return
        params = replace(params, max_tokens=max(1, min(params.max_tokens, self._fitting(len(token_ids), params))))
        group = engine.add_request(
            command.request_id, token_ids, params, parent=self._nearest(command.conversation, token_ids), hold=True
        )
        opened = engine.tokenizer.decode(token_ids[-8:]).rstrip().endswith("<think>")
        self.answers[command.request_id] = Answer(command, group, opened)

    def _fitting(self, num_prompt_tokens: int, params: Params) -> int:
        """Tokens that each completion can have at most in this pool: a chat cuts answers rather than refuse them."""
        cache = self.engine.cache
        shared = num_prompt_tokens // cache.block_size
        blocks = (cache.num_blocks - self.engine.scheduler.idle.num_pinned_blocks - shared) // params.num_sequences
        return blocks * cache.block_size - num_prompt_tokens % cache.block_size

    def _nearest(self, conversation: str, token_ids: list[int]) -> Sequence | None:
        """The kept sequence that has the most tokens in common with a prompt; the pinned system prompt is one."""
        sequences = [
            sequence
            for each in self.kept.values()
            if each.conversation == conversation
            for sequence in each.sequences
            if sequence.table is not None
        ]
        if self._pinned is not None:
            sequences.append(self._pinned)
        return max(sequences, key=lambda sequence: shared_length(sequence, token_ids), default=None)

    def step(self) -> None:
        """Compute one step, if there is work, and tell what came of it."""
        engine = self.engine
        before = engine.figures.last_step
        if self._pause:
            time.sleep(max(0.0, min(self._pause, self._next_step - time.monotonic())))
            self._next_step = time.monotonic() + self._pause
        try:
            deltas = engine.step()
        except Exception as error:  # the engine has freed what the step held, and goes on
            deltas = []
            sys.stderr.write(f"step failed: {type(error).__name__}: {error}\n")
        if engine.figures.last_step is not None and engine.figures.last_step is not before:
            self._steps.append(StepView(*astuple(engine.figures.last_step)))
        for delta in deltas:
            self._report(delta)
        self._tell_texts()
        self._tell_beams()
        for output in engine.take_finished():
            if self._pinning is not None and output.request_id == self._pinning[0].request_id:
                self._finish_pin(output)
                continue
            answer = self.answers.pop(output.request_id, None)
            if answer is None:
                continue
            if output.error is not None:
                for sequence in answer.group.sequences:
                    self._tell_text((output.request_id, sequence.index))
                self.send(RequestFailed(output.request_id, output.error))
            elif answer.searches:
                self._end_beams(answer, output)
            self._keep(answer, output)

    def _report(self, delta: Delta) -> None:
        answer = self.answers.get(delta.request_id)
        if answer is None:
            return
        group = answer.group
        self._tell_start(answer)
        sequence = next((each for each in group.sequences if each.index == delta.index), None)
        if sequence is None or answer.searches:
            return
        if delta.text or delta.token_ids:
            chosen = sequence.logprobs[-len(delta.token_ids) :] if delta.token_ids else []
            tokens = [self._choice(each) for each in chosen]
            text = TextDelta(delta.request_id, delta.index, delta.text, len(delta.token_ids), tokens)
            self._untold.setdefault((delta.request_id, delta.index), []).append(text)
        if delta.finish_reason is not None:
            self._tell_end(answer, delta.index, delta.finish_reason, sequence.num_output_tokens)

    def _tell_start(self, answer: Answer) -> None:
        group, waited = answer.group, answer.group.metrics.time_to_first_token
        if not answer.started and waited is not None:
            answer.started = True
            name, cached = answer.command.request_id, group.num_cached_tokens
            self.send(Started(name, group.num_prompt_tokens, cached, waited, answer.in_reasoning))

    def _tell_text(self, key: tuple[str, int]) -> None:
        """Send what one completion has said since the last time."""
        parts = self._untold.pop(key, [])
        if parts:
            text = "".join(part.text for part in parts)
            tokens = [token for part in parts for token in part.tokens]
            self.send(TextDelta(*key, text, sum(part.num_tokens for part in parts), tokens))

    def _tell_texts(self) -> None:
        """Send what was said, unless the last time is too recent."""
        now = time.monotonic()
        if self._untold and now - self._last_text >= self._text_interval:
            self._last_text = now
            for key in list(self._untold):
                self._tell_text(key)

    def _tell_end(self, answer: Answer, index: int, reason: str, num_tokens: int) -> None:
        self._tell_text((answer.command.request_id, index))
        metrics = answer.group.metrics
        elapsed = time.monotonic() - (metrics.first_token_time or time.monotonic())
        self.send(
            Finished(
                request_id=answer.command.request_id,
                index=index,
                finish_reason=reason,
                num_output_tokens=num_tokens,
                tokens_per_second=(num_tokens - 1) / elapsed if elapsed > 0 and num_tokens else 0.0,
                num_context_tokens=answer.group.num_prompt_tokens + num_tokens,
            )
        )

    def _choice(self, token: TokenLogprobs) -> TokenChoice:
        assert self.engine.tokenizer is not None
        text = self.engine.tokenizer.token_text
        return TokenChoice(
            text=text(token.token_id),
            logprob=token.logprob,
            top_texts=[text(token_id) for token_id, _ in token.top],
            top_logprobs=[logprob for _, logprob in token.top],
        )

    def _tell_beams(self) -> None:
        now = time.monotonic()
        for answer in self.answers.values():
            if (
                answer.searches
                and answer.group.metrics.first_token_time is not None
                and now - answer.beams_told_at >= self._interval
            ):
                self._tell_start(answer)
                answer.beams_told_at = now
                outputs = self.engine.requests.output_of(answer.group).outputs
                self.send(BeamsChanged(answer.command.request_id, _beam_views(outputs)))

    def _end_beams(self, answer: Answer, output: RequestOutput) -> None:
        self._tell_start(answer)
        self.send(BeamsChanged(output.request_id, _beam_views(output.outputs)))
        for completion in output.outputs:
            reason = completion.finish_reason or "abort"
            self._tell_end(answer, completion.index, reason, len(completion.token_ids))

    # --- what stays ---------------------------------------------------------------------------------------------------

    def _keep(self, answer: Answer, output: RequestOutput) -> None:
        sequences = [sequence for sequence in answer.group.sequences if sequence.table is not None]
        outputs = sorted(output.outputs, key=_by_score) if answer.searches else output.outputs
        kept = KeptAnswer(answer.command.conversation, sequences, outputs)
        if answer.kept and sequences:
            self.kept[output.request_id] = kept
        else:
            self._release(kept, None)

    def _keep_only(self, command: Keep) -> None:
        kept = self.kept.get(command.request_id)
        if kept is None or not 0 <= command.index < len(kept.outputs):
            return
        chosen = kept.outputs[command.index].token_ids

        def in_common(sequence: Sequence) -> int:
            """Tokens of the chosen candidate that a sequence holds: a finished beam's own are gone by now."""
            return common_length(sequence.output_token_ids, chosen)

        best = max(kept.sequences, key=in_common)
        self._release(kept, best)
        kept.sequences = [best]

    def _drop(self, request_id: str) -> None:
        answer = self.answers.get(request_id)
        if answer is not None:
            answer.kept = False
            self.engine.abort(request_id)
        kept = self.kept.pop(request_id, None)
        if kept is not None:
            self._release(kept, None)

    def _release(self, kept: KeptAnswer, spared: Sequence | None) -> None:
        for sequence in kept.sequences:
            if sequence is not spared:
                held.release(self._driver, sequence)

    # --- the pinned system prompt -------------------------------------------------------------------------------------

    def _pin(self, system: str) -> None:
        from minillm.params import SamplingParams

        engine = self.engine
        if self._pinned is not None:
            held.unpin(self._driver, self._pinned)
            self._pinned = None
        if not system or engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            return
        # What conversations with this system prompt have in common, whatever is asked.
        one, other = (
            engine.tokenizer.apply_chat_template(
                [{"role": "system", "content": system}, {"role": "user", "content": question}]
            )
            for question in ("a", "b")
        )
        common = common_length(one, other)
        if not 0 < common < min(len(one), len(other)):  # all of it: the template leaves the question out
            return
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        group = engine.add_request(f"pin {time.monotonic_ns()}", one[:common], params, hold=True)
        self._pinning = group, common

    def _finish_pin(self, output: RequestOutput) -> None:
        assert self._pinning is not None
        sequence, self._pinning = self._pinning[0].sequences[0], None
        if sequence.table is None:
            return
        try:
            held.pin(self._driver, sequence)
        except MinillmError as error:
            held.release(self._driver, sequence)
            self.send(Notice(f"the system prompt is not pinned: {error}"))
        else:
            self._pinned = sequence

    # --- pictures -----------------------------------------------------------------------------------------------------

    def show_cache(self, *, now: bool = False) -> None:
        """Tell what changed in the pool and what the steps did, if the last picture is not too recent."""
        moment = time.monotonic()
        if now or moment - self._last_picture >= self._interval:
            picture = self._view.changes(self._owners())
            if self._steps:
                self.send(Stepped(self._steps[-_MOST_STEPS:]))
                self._steps = []
            if picture is not None:
                self.send(picture)
            self._last_picture = moment

    def _owners(self) -> dict[int, Owner]:
        owners = {}
        for name, kept in self.kept.items():
            for sequence in kept.sequences:
                owners[sequence.seq_id] = Owner(name, sequence.index, "idle", sequence)
        for name, answer in self.answers.items():
            for sequence in answer.group.sequences:
                owners[sequence.seq_id] = Owner(name, sequence.index, "running", sequence)
        if self._pinned is not None:
            owners[self._pinned.seq_id] = Owner("system prompt", 0, "pinned", self._pinned)
        return owners


def _beam_views(outputs: list[CompletionOutput]) -> list[BeamView]:
    return [
        BeamView(
            text=output.text,
            score=output.score or 0.0,
            logprob=output.cumulative_logprob or 0.0,
            num_tokens=len(output.token_ids),
            finished=output.finish_reason is not None,
        )
        for output in sorted(outputs, key=_by_score)
    ]


def _by_score(output: CompletionOutput) -> float:
    return -(output.score or 0.0)


def serve(commands: queue.Queue[Command | None], send: Callable[[Event], None]) -> int:
    """Load the model that the first command names, then answer until ``None`` comes. Returns an exit code."""
    first = commands.get()
    if not isinstance(first, Load):
        return 0
    try:
        conversations = Conversations(_load(first, send), send)
    except MinillmError as error:
        send(LoadFailed(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        send(LoadFailed(f"{type(error).__name__}: {error}", 1))
        return 1
    conversations.show_cache(now=True)
    while True:
        idle = not conversations.engine.has_work
        try:
            command = commands.get(block=idle)
        except queue.Empty:
            pass
        else:
            if command is None:
                return 0
            conversations.handle(command)
            if not commands.empty():
                continue
        conversations.step()
        conversations.show_cache(now=not conversations.engine.has_work)


def _load(command: Load, send: Callable[[Event], None]) -> Engine:
    from minillm.config import EngineConfig
    from minillm.load import load_engine
    from minillm.progress import Progress

    began = time.monotonic()

    def report(progress: Progress) -> None:
        send(Loading(progress.label, progress.done, progress.total, progress.unit))

    report(Progress("starting", 0, None, ""))
    engine = load_engine(command.model, EngineConfig(**command.options), report, lambda text: send(Notice(text)))
    model = engine.runner.model
    itemsize = model.dtype.itemsize
    send(
        Loaded(
            model=command.model,
            source=engine.source,
            num_parameters=model.config.num_parameters,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=engine.max_model_len,
            block_size=engine.cache.block_size,
            num_blocks=engine.cache.num_blocks,
            num_host_blocks=engine.scheduler.swap.num_blocks,
            block_bytes=model.config.kv_bytes_per_token(itemsize) * engine.cache.block_size,
            has_chat_template=engine.tokenizer is not None and engine.tokenizer.has_chat_template,
            seconds=time.monotonic() - began,
        )
    )
    return engine


def _read_commands(stream: io.BufferedIOBase, commands: queue.Queue[Command | None]) -> None:
    for line in stream:
        message = decode(line)
        assert isinstance(message, Command)
        commands.put(message)
    commands.put(None)
    # The app is gone. A load or a long step must not keep the process, and its memory, alive.
    time.sleep(1)
    os._exit(0)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the app's to interpret
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not reach the app as an event

    def send(event: Event) -> None:
        try:
            events.write(encode(event))
        except BrokenPipeError:
            os._exit(0)

    commands: queue.Queue[Command | None] = queue.Queue()
    reader = threading.Thread(target=_read_commands, args=(sys.stdin.buffer, commands), daemon=True)
    reader.start()
    return serve(commands, send)


if __name__ == "__main__":
    sys.exit(main())
