"""Turn calls from the front end into jobs for the engine thread. Slow work is done in other threads."""

import queue
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from minillm.engine.engine import Engine
from minillm.engine.prompts import token_ids_of, tokenizer_of
from minillm.errors import MinillmError
from minillm.service import call_messages as messages
from minillm.service.engine_requests import EngineRequests
from minillm.service.messages import Abort, decode_command
from minillm.service.prepare import prepare, prompt_ids, with_thoughts
from minillm.service.sessions import Sessions
from minillm.service.sharing import SharedThreads

_THREADS = 4  # one tenant uses at most two threads
_SHORT = 512  # characters: encoding this many takes about 0.25 ms; waking another thread takes 0.1 ms and more


class CallDispatcher:
    """Queues the work of the engine thread. Its methods are called in the thread that reads the calls.

    Attributes:
        jobs: functions that the engine thread must call, in order. None means that the front end has ended.
    """

    def __init__(
        self, engine: Engine, requests: EngineRequests, sessions: Sessions, send: Callable[[messages.AnyEvent], None]
    ) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._engine, self._requests, self._sessions, self._send = engine, requests, sessions, send
        self._pool = SharedThreads(_THREADS, "prepare")
        self._grammars = SharedThreads(_THREADS, "grammar")  # a grammar that takes seconds delays only other grammars

    def begin_templates(self) -> None:
        """Start the process for chat templates before the first conversation arrives, because that takes a while."""
        first = messages.Conversation([{"role": "user", "content": "hello"}])
        # If this fails, later conversations report the error.
        self._pool.submit("", partial(prompt_ids, self._engine, first, ""))

    def take_command(self, command: Any) -> None:
        """Queue a command, if the front end is a chat app. The command None means that the app has ended."""
        self.jobs.put(None if command is None else partial(self._sessions.handle, "", command))

    def take(self, call: Any) -> None:
        """Carry out a call in this thread, or queue the call for another thread or for the engine thread.

        The call None means that the HTTP process has ended.
        """
        requests, sessions, then = self._requests, self._sessions, self.jobs.put
        match call:
            case None:
                then(None)
            case messages.Complete():
                requests.preparing.add(call.request_id)
                if "grammar" in call.params:
                    self._grammars.submit(call.tenant, partial(self._prepare, call))
                elif self._is_quick(call.prompt):
                    self._prepare(call)
                else:
                    self._pool.submit(call.tenant, partial(self._prepare, call))
            case messages.Tokenize() | messages.Detokenize():
                self._pool.submit(call.tenant, partial(self._answer, call.call_id, partial(self._tokens, call)))
            case messages.PinPrefix():
                self._pool.submit(call.tenant, partial(self._pin, call))
            case messages.Ping(call_id):
                self._send(messages.Result(call_id, requests.step_seconds))
            case Abort(request_id):
                then(partial(requests.abort, request_id))
            case messages.UnpinPrefix():
                then(partial(requests.prefixes.unpin, call))
            case messages.ReadCache():
                then(partial(requests.read_cache, call))
            case messages.OpenSession(session, tenant, reader, salt, watches):
                then(partial(sessions.open, session, tenant, reader, salt, watches=watches))
            case messages.SessionCommand(session, line):
                then(partial(self._command, session, line))
            case messages.CloseSession(session):
                then(partial(sessions.close, session))

    def _is_quick(self, prompt: str | list[int] | messages.Conversation | None) -> bool:
        """Return whether a prompt can be prepared so fast that this thread may do it without delaying later calls."""
        if isinstance(prompt, str):
            tokenizer = self._engine.tokenizer
            return len(prompt) <= _SHORT and (tokenizer is None or tokenizer.encodes_here)
        return prompt is None or isinstance(prompt, list)  # nothing to encode

    def _prepare(self, call: messages.Complete) -> None:
        try:
            prepared = prepare(self._engine, call)
        except MinillmError as error:
            self.jobs.put(partial(self._requests.refuse, call.request_id, error))
        except Exception as error:
            sys.stderr.write(f"preparing a prompt failed: {type(error).__name__}: {error}\n")
            self.jobs.put(partial(self._requests.refuse, call.request_id, MinillmError("the prompt cannot be read")))
        else:
            self.jobs.put(partial(self._requests.add, prepared))

    def _pin(self, call: messages.PinPrefix) -> None:
        def work() -> None:
            ids = prompt_ids(self._engine, call.prompt, call.tenant)
            self.jobs.put(partial(self._requests.prefixes.pin, call, ids))

        self._answer(call.call_id, work, silent=True)

    def _answer(self, call_id: str, work: Callable[[], object], *, silent: bool = False) -> None:
        """Call ``work``, and send its value as the result of the call. If ``work`` raises an exception, send the error.

        ``silent``: send only an error, because another function will send the result.
        """
        try:
            value = work()
        except MinillmError as error:
            self._send(messages.Result(call_id, None, str(error), messages.kind_of(error)))
        except Exception as error:
            sys.stderr.write(f"call failed: {type(error).__name__}: {error}\n")
            self._send(messages.Result(call_id, None, "the text cannot be read"))
        else:
            if not silent:
                self._send(messages.Result(call_id, value))

    def _tokens(self, call: messages.Tokenize | messages.Detokenize) -> object:
        tokenizer = tokenizer_of(self._engine)
        if isinstance(call, messages.Detokenize):
            return tokenizer.decode(call.token_ids)
        if isinstance(call.prompt, messages.Conversation):
            ids = prompt_ids(self._engine, call.prompt, call.tenant)
            ids, _ = with_thoughts(self._engine, ids, call.prompt, is_bare=call.is_bare)
        else:
            ids = token_ids_of(
                self._engine,
                call.prompt,
                add_special_tokens=call.add_special_tokens,
                parse_special=call.parse_special,
            )
        return {"tokens": ids, "texts": [tokenizer.token_text(each) for each in ids]}

    def _command(self, session: str, line: bytes) -> None:
        try:
            self._sessions.handle(session, decode_command(line))
        except Exception as error:  # an invalid command of one app must not stop the engine for the others
            sys.stderr.write(f"command failed: {type(error).__name__}: {error}\n")
