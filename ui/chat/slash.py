"""Slash commands: typed in the prompt, bound to keys, offered by the palette, and listed in the help."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from minillm.errors import UsageError, nearest

if TYPE_CHECKING:
    from textual.binding import Binding

Action = Callable[[Any, str], Awaitable[None]]
"""A function that runs a command. Its arguments are the chat pane and the command's argument."""
Scope = Literal["chat", "app", "everywhere"]


_COMMAND = re.compile(r"/(?:[^\W\d_][\w-]*)?(?:\s|$)")


@dataclass(frozen=True, kw_only=True)
class SlashCommand:
    """A command ``/name argument``, and the keys that run it."""

    name: str
    summary: str
    action: Action
    argument: str = ""  # name of the argument for display, in brackets if the argument is optional
    keys: Mapping[str, str] = field(default_factory=dict)  # key -> argument with which the key runs the command
    key_action: str = ""  # the action that the keys run, if it differs from the command
    shown_key: str = ""  # the keys for display
    label: str = ""  # the command's label in the key bar; empty if the key bar does not show it
    also: tuple[str, ...] = ()  # other names for the command, which other chat programs use
    # Where the keys work. "chat": in the chat. "app": in the chat, unless a widget uses the key. "everywhere": also in
    # dialogs.
    scope: Scope = "chat"

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def needs_argument(self) -> bool:
        return self.argument[:1] not in ("", "[")

    def bindings(self) -> Iterator[Binding]:
        from textual.binding import Binding  # not at the top: the plain chat needs no Textual

        label, priority = self.label or self.name.capitalize(), self.scope != "app"
        for key, argument in self.keys.items():
            action = self.key_action or f"command({self.name!r}, {argument!r})"
            name = f"{self.name}-{argument}".rstrip("-")
            yield Binding(key, action, label, show=bool(self.label), priority=priority, id=name)


class CommandTable(dict[str, SlashCommand]):
    """The commands by name, in the order of their declaration."""

    def command(self, name: str, summary: str, key: str = "", **options: Any) -> Callable[[Action], Action]:
        """Return a decorator that declares a function as the command ``name``.

        ``key`` is a key that also runs the command. `SlashCommand` describes the other ``options``.
        """
        if key:
            options = {"keys": {key: ""}, "shown_key": "+".join(map(str.capitalize, key.split("+"))), **options}

        def add(action: Action) -> Action:
            self[name] = SlashCommand(name=name, summary=summary, action=action, **options)
            return action

        return add

    def bindings(self, *scopes: Scope) -> list[Binding]:
        """Return the key bindings of all commands with a scope in ``scopes``."""
        return [binding for command in self.values() if command.scope in scopes for binding in command.bindings()]

    def parse(self, text: str) -> tuple[SlashCommand, str]:
        """Return the command that a line calls, and its argument. An unambiguous beginning of the name is enough.

        Raises:
            UsageError: the name is unknown or ambiguous, or the argument is missing. The message suggests the most
                similar command.
        """
        name, argument = first_word(text.removeprefix("/"))
        begun = self._begun(name) if name else []
        exact = [command for command in begun if name.lower() in (command.name, *command.also)]
        if exact or len(begun) == 1:
            command = (exact or begun)[0]
            if command.needs_argument and not argument:
                raise UsageError(f"/{command.name} needs an argument: {command.usage}")
            return command, argument
        if begun:
            raise UsageError(f"/{name} is ambiguous: {', '.join('/' + command.name for command in begun)}")
        close = nearest(name, list(self))
        meant = f"; did you mean /{close}?" if close else "; /help lists all commands."
        raise UsageError(f"there is no /{name}{meant} Put a space first to send it as a question")

    def completions(self, text: str) -> list[SlashCommand]:
        """Return the commands that a half-typed line may become; none if the line already has an argument."""
        if not text.startswith("/") or re.search(r"\s", text):
            return []
        return self._begun(text[1:])

    def _begun(self, name: str) -> list[SlashCommand]:
        """Return the commands with a name that begins with ``name``. A command with exactly this name is the first.

        If there are none, compare ``name`` with the commands' other names (`also`) instead.
        """
        name = name.lower()
        found = [command for command in self.values() if command.name.startswith(name)]
        found.sort(key=lambda command: command.name != name)
        return found or [each for each in self.values() if any(other.startswith(name) for other in each.also)]


def first_word(text: str) -> tuple[str, str]:
    """Return the first word of a text, and the rest without the white space around it."""
    word, *rest = text.split(maxsplit=1) or [""]
    return word, "".join(rest).strip()


def is_command(text: str) -> bool:
    """Return whether ``text`` is a command: it begins with a slash and one word, or is a slash alone.

    Anything else is a question: a path (``/usr/bin``), a comment (``// …``), or a text with a space before the slash.
    """
    return _COMMAND.match(text) is not None
