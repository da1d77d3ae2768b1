"""Sessions of chat apps on other machines. Each session has its own conversations in the shared block pool.

Apps choose the ids of their requests. To make the ids unique, this module prefixes each id with the session's name. It
removes the prefix again from events for the session's own app. In the view of the cache, an app sees its own ids
without a prefix, and the ids of other sessions with theirs.
"""

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

_REFUSED = (chat.Load, chat.Pace)  # commands that are ignored because they would affect other apps


@dataclass
class Session:
    """A connected app."""

    name: str
    tenant: str
    conversations: Conversations
    asked: set[str] = field(default_factory=set)  # requests that have not ended, or with an end that was not reported


@dataclass
class Sessions:
    """The sessions of all connected apps. All methods must be called in the engine thread."""

    driver: Driver
    requests: EngineRequests
    send: Callable[[messages.Event], None]
    open_ones: dict[str, Session] = field(default_factory=dict)
    ending: list[Session] = field(default_factory=list)

    def open(self, name: str, tenant: str, reader: str | None, salt: str | None = None) -> None:
        """Open a session, and send the full state of the pool to the app.

        If ``reader`` is given, the app sees only the text of this tenant. Otherwise it sees all text.
        """

        def send(event: chat.Event) -> None:
            self.send(messages.SessionEvent(name, chat.encode(_renamed(event, f"{name}/"))))

        conversations = Conversations(self.driver.engine, send, others=partial(self.requests.owners, reader), salt=salt)
        conversations.reporter.view.shows_all_words = reader is None
        self.open_ones[name] = Session(name, tenant, conversations)
        conversations.reporter.show_cache(now=True)

    def handle(self, name: str, line: bytes) -> None:
        """Carry out a command of an app. ``line`` is the command, encoded as JSON."""
        session = self.open_ones.get(name)
        if session is None:
            return
        command = chat.decode_command(line)
        if not isinstance(command, _REFUSED):
            if hasattr(command, "request_id"):
                command.request_id = f"{name}/{command.request_id}"
            if isinstance(command, chat.Generate):
                session.asked.add(command.request_id)
            try:
                session.conversations.handle(command)
            finally:
                self._tell_ends(session)

    def close(self, name: str) -> None:
        """Close a session and free its blocks. Running answers end at the next step."""
        session = self.open_ones.pop(name, None)
        if session is not None:
            session.conversations.close()
            self.ending.append(session)

    def take(self, deltas: Iterable[Delta], outputs: Iterable[RequestOutput]) -> None:
        """Pass the results of an engine step to the apps. Each app takes its own results."""
        deltas, outputs = list(deltas), list(outputs)
        for session in (*self.open_ones.values(), *self.ending):
            session.conversations.take(deltas, outputs)
            self._tell_ends(session)
        self.ending = [session for session in self.ending if not session.conversations.is_idle]

    def _tell_ends(self, session: Session) -> None:
        """Tell the HTTP process which answers of the session have ended or could not start."""
        if session.asked:
            for name in session.asked - session.conversations.answers.keys():
                session.asked.discard(name)
                self.send(messages.SessionAnswered(session.name, name.removeprefix(f"{session.name}/")))

    def report(self, *, now: bool = False) -> None:
        """Send the changes in the pool to each app, at the rate that the app has asked for."""
        for session in self.open_ones.values():
            session.conversations.reporter.show_cache(now=now)

    def owners(self, reader: str | None) -> dict[int, Owner]:
        """Return the owners of all sessions' sequences, by seq_id.

        If ``reader`` is given, the owners say that only this tenant's text may be shown.
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
