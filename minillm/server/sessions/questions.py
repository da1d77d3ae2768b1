"""Questions of chat apps. Like all other requests, a question waits in the queue until the engine may run it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from minillm.server.bodies import MAX_N, BadField
from minillm.server.http.fair_queue import FairQueue, QueueFull, num_slots
from minillm.server.replicas import Replicas
from minillm.service import call_messages as messages
from minillm.service import messages as chat


@dataclass
class Questions:
    """The questions of one session, from their arrival to the ends of their answers.

    Attributes:
        send_line: sends the app an event, which is encoded as a line of JSON.
    """

    session: str
    tenant: str
    engine: Replicas
    queue: FairQueue
    send_line: Callable[[bytes], object]
    _asked: dict[str, _PendingQuestion] = field(default_factory=dict)  # by request id, which the app chooses

    def take(self, line: bytes) -> None:
        """Carry out a command of the app. ``line`` is the command, encoded as JSON.

        Raises:
            BadField: the line is not a valid command.
            QueueFull: the command is a question, and the queue is full. The command had no effect.
        """
        try:
            command = chat.decode_command(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadField(f"not a command: {str(error)[:200]}") from None
        match command:
            case chat.Generate(request_id):
                self._ask(request_id, command, line)
                return
            case chat.Abort(request_id) if self._leaves(request_id):
                self._refuse(request_id, "stopped while it waited in the queue")
                return
            case chat.Load() | chat.Pace():  # they would affect all clients
                return
            case chat.Drop(request_id):
                self._leaves(request_id)
            case chat.Forget(conversation):
                for name in [name for name, each in self._asked.items() if each.conversation == conversation]:
                    self._leaves(name)
        self.engine.send(messages.SessionCommand(self.session, line))

    def end(self, request_id: str) -> None:
        """Free the slots that an answer has in the queue. Call this when the answer has ended, for any reason."""
        if (asked := self._asked.get(request_id)) is not None:
            asked.ended.set()

    def close(self) -> None:
        """Remove all questions from the queue, and free the slots of all answers."""
        for asked in self._asked.values():
            asked.task.cancel()

    def _ask(self, request_id: str, command: chat.Generate, line: bytes) -> None:
        if request_id in self._asked:
            raise BadField(f"request_id: {request_id} is in use; choose another", "request_id")
        count = num_slots(command.params)
        if not isinstance(count, int) or not 1 <= count <= MAX_N:
            raise BadField(f"n and beam_width must be from 1 to {MAX_N}", "params")
        self.queue.check_space(self.tenant)
        asked = self._asked[request_id] = _PendingQuestion(command.conversation, count)
        asked.task = asyncio.create_task(self._wait(request_id, asked, line))

    async def _wait(self, request_id: str, asked: _PendingQuestion, line: bytes) -> None:
        try:
            async with self.queue.take(self.tenant, asked.count):
                asked.has_slots = True
                self.engine.send(messages.SessionCommand(self.session, line))
                await asked.ended.wait()
        except QueueFull:  # other requests filled the queue first
            self._refuse(request_id, "the server's queue is full; ask again later")
        finally:
            if self._asked.get(request_id) is asked:
                del self._asked[request_id]

    def _leaves(self, request_id: str) -> bool:
        """Remove a question from the queue. Return False if the question is not in the queue."""
        asked = self._asked.get(request_id)
        if asked is None or asked.has_slots:
            return False
        del self._asked[request_id]
        asked.task.cancel()
        return True

    def _refuse(self, request_id: str, why: str) -> None:
        self.send_line(chat.encode(chat.RequestFailed(request_id, why)))


@dataclass(eq=False)
class _PendingQuestion:
    """A question, from its arrival to the end of its answer."""

    conversation: str
    count: int  # number of slots that the question needs, one for each sequence
    has_slots: bool = False  # the question has its slots and was sent to the engine
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] = field(init=False)
