"""Slash commands: typed in the prompt, pressed as keys, offered by the palette, listed by the help."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from minillm.errors import UsageError, nearest

if TYPE_CHECKING:
    from textual.binding import Binding

Action = Callable[[Any, str], Awaitable[None]]
"""Carries a command out for the talk that it was given to, with its argument."""
Scope = Literal["chat", "app", "everywhere"]


_COMMAND = re.compile(r"/(?:[^\W\d_][\w-]*)?(?:\s|$)")


@dataclass(frozen=True, kw_only=True)
class SlashCommand:
    """``/name argument``, and the keys that do the same."""

    name: str
    summary: str
    action: Action
    argument: str = ""  # named for people; in brackets where it may be left out
    keys: Mapping[str, str] = field(default_factory=dict)  # each with the argument that it stands for
    key_action: str = ""  # what the keys do, where that is not quite the same
    shown_key: str = ""  # how people are told
    label: str = ""  # in the line of keys; empty: not there
    also: tuple[str, ...] = ()  # names that other chats have for it
    scope: Scope = "chat"  # where its keys act: in the chat, there and named last, or in dialogs, too

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def needs_argument(self) -> bool:
        return self.argument[:1] not in ("", "[")

    def bindings(self) -> Iterator[Binding]:
        from textual.binding import Binding  # not at the top: a chat line by line needs no Textual

        label, priority = self.label or self.name.capitalize(), self.scope != "app"
        for key, argument in self.keys.items():
            action = self.key_action or f"command({self.name!r}, {argument!r})"
            name = f"{self.name}-{argument}".rstrip("-")
            yield Binding(key, action, label, show=bool(self.label), priority=priority, id=name)


class CommandTable(dict[str, SlashCommand]):
    """The commands by name, in the order in which they were added."""

    def command(self, name: str, summary: str, key: str = "", **options: Any) -> Callable[[Action], Action]:
        """Decorate the function of a command. ``key`` runs it, too; for ``options`` see `SlashCommand`."""
        if key:
            options = {"keys": {key: ""}, "shown_key": "+".join(map(str.capitalize, key.split("+"))), **options}

        def add(action: Action) -> Action:
            self[name] = SlashCommand(name=name, summary=summary, action=action, **options)
            return action

        return add

    def bindings(self, *scopes: Scope) -> list[Binding]:
        """The keys of the commands of these scopes."""
        return [binding for command in self.values() if command.scope in scopes for binding in command.bindings()]

    def parse(self, text: str) -> tuple[SlashCommand, str]:
        """The command that a line calls, and its argument. A beginning that only one command has is enough.

        Raises:
            UsageError: there is none of that name, or it lacks its argument; names the nearest.
        """
        name, _, argument = text.removeprefix("/").strip().partition(" ")
        begun = self._begun(name) if name else []
        exact = [command for command in begun if name.lower() in (command.name, *command.also)]
        if exact or len(begun) == 1:
            command = (exact or begun)[0]
            if command.needs_argument and not argument.strip():
                raise UsageError(f"/{command.name} needs its argument: {command.usage}")
            return command, argument.strip()
        if begun:
            raise UsageError(f"/{name} may be {', '.join('/' + command.name for command in begun)}")
        close = nearest(name, list(self))
        meant = f", did you mean /{close}?" if close else "; /help lists all;"
        raise UsageError(f"there is no /{name}{meant} With a blank before the slash it is a question")

    def completions(self, text: str) -> list[SlashCommand]:
        """The commands that a half-typed line may become; none once its name is complete and an argument begins."""
        if not text.startswith("/") or " " in text or "\n" in text:
            return []
        return self._begun(text[1:])

    def _begun(self, name: str) -> list[SlashCommand]:
        """The commands whose names begin so; where none does, those whose other names do."""
        name = name.lower()
        found = [command for command in self.values() if command.name.startswith(name)]
        return found or [each for each in self.values() if any(other.startswith(name) for other in each.also)]


def is_command(text: str) -> bool:
    """Whether a text is a command: a slash and one word, or a slash alone. Paths, comments and a text that begins with
    a blank are questions.
    """
    return _COMMAND.match(text) is not None
