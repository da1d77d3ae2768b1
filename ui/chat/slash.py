"""Slash commands: typed in the prompt, bound to keys, offered by the palette, listed by the help."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from minillm.errors import UsageError, nearest

if TYPE_CHECKING:
    from textual.binding import Binding

Action = Callable[[Any, str], Awaitable[None]]
"""Runs a command for the chat pane, with its argument."""
Scope = Literal["chat", "app", "everywhere"]


_COMMAND = re.compile(r"/(?:[^\W\d_][\w-]*)?(?:\s|$)")


@dataclass(frozen=True, kw_only=True)
class SlashCommand:
    """``/name argument``, and the keys that run it."""

    name: str
    summary: str
    action: Action
    argument: str = ""  # its displayed name, in brackets if optional
    keys: Mapping[str, str] = field(default_factory=dict)  # each with the argument it stands for
    key_action: str = ""  # the action of the keys, if it differs from the command
    shown_key: str = ""  # as displayed
    label: str = ""  # in the key bar; empty: not shown there
    also: tuple[str, ...] = ()  # names from other chats
    scope: Scope = "chat"  # where its keys work: in the chat, in the chat with low priority, or in dialogs as well

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
    """The commands by name, in the order they were added."""

    def command(self, name: str, summary: str, key: str = "", **options: Any) -> Callable[[Action], Action]:
        """Decorate the function of a command. ``key`` runs it as well. For ``options``, see `SlashCommand`."""
        if key:
            options = {"keys": {key: ""}, "shown_key": "+".join(map(str.capitalize, key.split("+"))), **options}

        def add(action: Action) -> Action:
            self[name] = SlashCommand(name=name, summary=summary, action=action, **options)
            return action

        return add

    def bindings(self, *scopes: Scope) -> list[Binding]:
        """Return the key bindings of the commands of these scopes."""
        return [binding for command in self.values() if command.scope in scopes for binding in command.bindings()]

    def parse(self, text: str) -> tuple[SlashCommand, str]:
        """Return the command that a line calls, and its argument. An unambiguous beginning of its name is enough.

        Raises:
            UsageError: the name is unknown or ambiguous, or the argument is missing. The message names the nearest
                command.
        """
        name, _, argument = text.removeprefix("/").strip().partition(" ")
        begun = self._begun(name) if name else []
        exact = [command for command in begun if name.lower() in (command.name, *command.also)]
        if exact or len(begun) == 1:
            command = (exact or begun)[0]
            if command.needs_argument and not argument.strip():
                raise UsageError(f"/{command.name} needs an argument: {command.usage}")
            return command, argument.strip()
        if begun:
            raise UsageError(f"/{name} is ambiguous: {', '.join('/' + command.name for command in begun)}")
        close = nearest(name, list(self))
        meant = f"; did you mean /{close}?" if close else "; /help lists all commands."
        raise UsageError(f"there is no /{name}{meant} Put a space first to send it as a question")

    def completions(self, text: str) -> list[SlashCommand]:
        """Return the commands that a half-typed line may become, none after its name is complete."""
        if not text.startswith("/") or " " in text or "\n" in text:
            return []
        return self._begun(text[1:])

    def _begun(self, name: str) -> list[SlashCommand]:
        """Return the commands with names that begin so, else those with other names that do."""
        name = name.lower()
        found = [command for command in self.values() if command.name.startswith(name)]
        return found or [each for each in self.values() if any(other.startswith(name) for other in each.also)]


def is_command(text: str) -> bool:
    """Return whether a text is a command: a slash and one word, or a slash alone.

    Paths, comments and texts that begin with a space are questions.
    """
    return _COMMAND.match(text) is not None
