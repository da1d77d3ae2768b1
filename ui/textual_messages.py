"""Faster delivery of messages by Textual. `textual_internals` imports this module.

Textual searches all base classes of a widget for the methods that handle a message. This module stores their names.
"""

from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from typing import Any

from textual.message import Message
from textual.message_pump import MessagePump

_textual_methods = MessagePump._get_dispatch_methods


@cache
def _handlers(receiver: type, message: type, name: str) -> list[tuple[type, str]] | None:
    """Return the class and the name of each method. None: one has the decorator ``on``, and its selectors decide."""
    found = []
    for each in receiver.__mro__:
        if set(each.__dict__.get("_decorated_handlers") or ()).intersection(message.__mro__):
            return None
        for method in (f"_{name}", name):
            if each.__dict__.get(method):
                if not getattr(each.__dict__[method], "_textual_on", None):
                    found.append((each, method))
                break
    return found


def _get_dispatch_methods(
    self: MessagePump, method_name: str, message: Message
) -> Iterable[tuple[type, Callable[[Message], Awaitable[None]]]]:
    kind: Any = type(message)
    handlers = _handlers(type(self), kind, method_name)
    if handlers is None:
        yield from _textual_methods(self, method_name, message)
        return
    for owner, name in handlers:
        if message._no_default_action:
            break
        yield owner, owner.__dict__[name].__get__(self, owner)


MessagePump._get_dispatch_methods = _get_dispatch_methods  # type: ignore[method-assign]
