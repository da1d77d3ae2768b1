"""The engine's side: reads commands from stdin, writes events to stdout, computes in between.

Run as ``python -m minillm.service.worker``. It ends when stdin does, so it never outlives the app.
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minillm.errors import MinillmError, UsageError
from minillm.service.cache_view import CacheView
from minillm.service.messages import (
    Abort,
    Command,
    ContextFull,
    Event,
    Finished,
    Forget,
    Generate,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    Notice,
    RequestFailed,
    Started,
    TextDelta,
    decode,
    encode,
)

if TYPE_CHECKING:
    from minillm.engine import Engine
    from minillm.outputs import Delta
    from minillm.sequence import Sequence, SequenceGroup

_CACHE_INTERVAL = 0.1  # seconds between two pictures of the pool


@dataclass
class Answer:
    """A request under way."""

    command: Generate
    group: SequenceGroup
    started: bool = False


@dataclass
class Conversations:
    """Drives one engine for the app: answers to conversations, each of which keeps its blocks between turns."""

    engine: Engine
    send: Callable[[Event], None]
    answers: dict[str, Answer] = field(default_factory=dict)
    kept: dict[str, Sequence] = field(default_factory=dict)  # conversation -> its idle sequence

    def __post_init__(self) -> None:
        self._view = CacheView(self.engine.cache)
        self._last_picture = 0.0

    def handle(self, command: Command) -> None:
        if isinstance(command, Generate):
            try:
                self._generate(command)
            except MinillmError as error:
                self.send(RequestFailed(command.request_id, str(error)))
        elif isinstance(command, Abort):
            self.engine.abort(command.request_id)
        elif isinstance(command, Forget):
            for answer in self.answers.values():
                if answer.command.conversation == command.conversation:
                    self.engine.abort(answer.command.request_id)
                    answer.group.hold = False
            kept = self.kept.pop(command.conversation, None)
            if kept is not None:
                self.engine.release(kept)

    def _generate(self, command: Generate) -> None:
        from minillm.decoding.params import SamplingParams

        engine = self.engine
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise UsageError("this model has no chat template, so it cannot chat; use an instruct model")
        if any(answer.command.conversation == command.conversation for answer in self.answers.values()):
            raise UsageError("an answer of this conversation is still being generated; stop it first")
        params = SamplingParams.from_mapping(command.params)
        token_ids = engine.tokenizer.apply_chat_template(command.messages)
        if len(token_ids) >= engine.max_model_len:
            self.send(ContextFull(command.request_id, len(token_ids), engine.max_model_len))
            return
        group = engine.add_request(
            command.request_id, token_ids, params, parent=self.kept.get(command.conversation), hold=True
        )
        self.answers[command.request_id] = Answer(command, group)

    def step(self) -> None:
        """Compute one step, if there is work, and tell what came of it."""
        try:
            deltas = self.engine.step()
        except Exception as error:  # the engine has freed what the step held, and goes on
            deltas = []
            sys.stderr.write(f"step failed: {type(error).__name__}: {error}\n")
        for delta in deltas:
            self._report(delta)
        for output in self.engine.take_finished():
            answer = self.answers.pop(output.request_id, None)
            if answer is None:
                continue
            if output.error is not None:
                self.send(RequestFailed(output.request_id, output.error))
            self._keep(answer)

    def _report(self, delta: Delta) -> None:
        answer = self.answers[delta.request_id]
        group, metrics = answer.group, answer.group.metrics
        if not answer.started and metrics.time_to_first_token is not None:
            answer.started = True
            cached, waited = group.num_cached_tokens, metrics.time_to_first_token
            self.send(Started(delta.request_id, group.num_prompt_tokens, cached, waited))
        if delta.text or delta.token_ids:
            self.send(TextDelta(delta.request_id, delta.index, delta.text, len(delta.token_ids)))
        if delta.finish_reason is not None:
            sequence = group.sequences[delta.index]
            elapsed = time.monotonic() - (metrics.first_token_time or time.monotonic())
            rate = (sequence.num_output_tokens - 1) / elapsed if elapsed > 0 else 0.0
            self.send(
                Finished(
                    request_id=delta.request_id,
                    index=delta.index,
                    finish_reason=delta.finish_reason,
                    num_output_tokens=sequence.num_output_tokens,
                    tokens_per_second=rate,
                    num_context_tokens=len(sequence.token_ids),
                )
            )

    def _keep(self, answer: Answer) -> None:
        """The finished sequence replaces the one that the conversation kept before."""
        conversation, sequence = answer.command.conversation, answer.group.sequences[0]
        if sequence.table is not None:
            before = self.kept.pop(conversation, None)
            if before is not None:
                self.engine.release(before)
            self.kept[conversation] = sequence

    def show_cache(self, *, now: bool = False) -> None:
        """Send a picture of the pool, if it changed and the last one is not too recent."""
        moment = time.monotonic()
        if now or moment - self._last_picture >= _CACHE_INTERVAL:
            picture = self._view.changes(self._owners())
            if picture is not None:
                self._last_picture = moment
                self.send(picture)

    def _owners(self) -> dict[int, tuple[str, str]]:
        owners = {sequence.seq_id: (name, "idle") for name, sequence in self.kept.items()}
        for answer in self.answers.values():
            for sequence in answer.group.sequences:
                owners[sequence.seq_id] = (answer.command.request_id, "running")
        return owners


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
    from minillm.build import build_engine
    from minillm.config import EngineConfig
    from minillm.progress import Progress

    began = time.monotonic()

    def report(progress: Progress) -> None:
        send(Loading(progress.label, progress.done, progress.total, progress.unit))

    report(Progress("starting", 0, None, ""))
    engine = build_engine(command.model, EngineConfig(**command.options), report, lambda text: send(Notice(text)))
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
