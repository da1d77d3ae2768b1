"""Sessions of chat apps. Each session has its own conversations in the shared block pool.

If the front end of this process is a chat app, this app has the only session, and the session's name is empty.
Otherwise the HTTP process opens a session for each app.

Apps choose the ids of their requests. To make the ids unique, this module prefixes each id with the session's name. It
removes the prefix again from events for the session's own app. In the view of the cache, an app sees its own ids
without a prefix, and the ids of other sessions with their prefixes.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from minillm.engine.driver import Driver
from minillm.outputs import Delta, RequestOutput
from minillm.service import call_messages as messages
from minillm.service import messages as chat
from minillm.service.cache_view import Owner
from minillm.service.conversations import Conversations
from minillm.service.engine_requests import EngineRequests

_A_MOMENT = 0.05  # maximum seconds to wait before the next check for commands while the engine is slowed down


@dataclass
class Session:
    """The session of a connected chat app, or of a client that only watches the pool."""

    prefix: str  # prefix of the ids of the session's requests
    tenant: str
    conversations: Conversations
    asked: set[str] = field(default_factory=set)  # requests that have not ended, or with an end that was not reported


@dataclass
class Sessions:
    """The sessions of all connected apps. All methods must be called in the engine thread."""

    driver: Driver
    requests: EngineRequests
    send: Callable[[messages.AnyEvent | chat.Event], None]
    open_ones: dict[str, Session] = field(default_factory=dict)
    ending: list[Session] = field(default_factory=list)
    _pause: float = 0.0  # minimum seconds between steps
    _next_step: float = 0.0  # time at which the next step is due

    def open(
        self, name: str, tenant: str = "", reader: str | None = None, salt: str | None = None, *, watches: bool = False
    ) -> None:
        """Open a session, and send the full state of the pool to the app.

        Args:
            reader: the tenant with the only text that the app may see. If it is None, the app may see all text.
            watches: the client only watches the pool, so it gets no events except changes in the pool.
        """
        prefix = f"{name}/" if name else ""

        def send(event: chat.Event) -> None:
            if not watches or isinstance(event, chat.CacheChanged):
                self.send(messages.SessionEvent(name, chat.encode(_renamed(event, prefix))))

        others = partial(self.requests.owners, reader) if name else dict
        conversations = Conversations(self.driver, send if name else self.send, others=others, salt=salt)
        conversations.reporter.view.shows_all_words = reader is None
        self.open_ones[name] = Session(prefix, tenant, conversations)
        conversations.reporter.show_cache(now=True)

    def handle(self, name: str, command: chat.Command) -> None:
        """Carry out a command of an app."""
        session = self.open_ones.get(name)
        if isinstance(command, chat.Pace):
            self._pause = 1 / command.steps_per_second if command.steps_per_second > 0 else 0.0
            self._next_step = min(self._next_step, time.monotonic() + self._pause)
        elif session is not None:
            if hasattr(command, "request_id"):
                command.request_id = f"{session.prefix}{command.request_id}"
            if isinstance(command, chat.Generate) and name:
                session.asked.add(command.request_id)
            try:
                session.conversations.handle(command)
            finally:
                self._send_ends(session)

    def wait(self) -> bool:
        """Wait until the next step is due, at the pace that the app has set. Return whether the step is due.

        The wait takes at most `_A_MOMENT` seconds, so that commands are handled in between.
        """
        if self._pause:  # a question's first step never waits
            wait = self._next_step - time.monotonic()
            time.sleep(max(0.0, min(wait, _A_MOMENT)))
            if wait > _A_MOMENT:
                return False
            self._next_step = time.monotonic() + self._pause
        return True

    def close(self, name: str) -> None:
        """Close a session and free its blocks. Running answers end at the next step."""
        session = self.open_ones.pop(name, None)
        if session is not None:
            session.conversations.close()
            if not session.conversations.is_idle:
                self.ending.append(session)

    def take(self, deltas: Iterable[Delta], outputs: Iterable[RequestOutput]) -> None:
        """Pass the results of an engine step to the apps. Each app takes its own results."""
        deltas, outputs = list(deltas), list(outputs)
        for session in (*self.open_ones.values(), *self.ending):
            session.conversations.take(deltas, outputs)
            self._send_ends(session)
        self.ending = [session for session in self.ending if not session.conversations.is_idle]

    def _send_ends(self, session: Session) -> None:
        """Tell the HTTP process which answers of the session have ended or could not start."""
        if session.asked:
            for name in session.asked - session.conversations.answers.keys():
                session.asked.discard(name)
                self.send(messages.SessionAnswered(*name.split("/", 1)))

    def report(self, *, now: bool = False) -> None:
        """Send the changes in the pool to each app, at the rate that the app has asked for."""
        for session in self.open_ones.values():
            session.conversations.reporter.show_cache(now=now)

    def owners(self, reader: str | None) -> dict[int, Owner]:
        """Return the owners of all sessions' sequences, by seq_id.

        An owner also says whether ``reader``, a tenant, may see the sequence's text. Without ``reader``, all text may
        be seen.
        """
        found: dict[int, Owner] = {}
        for session in (*self.open_ones.values(), *self.ending):
            shows = reader in (None, session.tenant)
            for seq_id, owner in session.conversations.own().items():
                found[seq_id] = replace(owner, shows_words=shows)
        return found


def _renamed(event: chat.Event, prefix: str) -> chat.Event:
    """Return the event with ``prefix`` removed from the ids of requests."""
    if hasattr(event, "request_id"):
        return msgspec.structs.replace(event, request_id=event.request_id.removeprefix(prefix))
    if isinstance(event, chat.CacheChanged):
        cut = msgspec.structs.replace
        tables = [cut(each, owner=each.owner.removeprefix(prefix)) for each in event.tables]
        log = [cut(each, owner=each.owner.removeprefix(prefix)) for each in event.log]
        return cut(event, tables=tables, log=log)
    return event
