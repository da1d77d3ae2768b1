"""The named actions of the chat and their keys.

Users can replace keys in the configuration, in ``[keymap]``. A menu lists all actions: ctrl+g opens it, and a letter
runs an action. This works everywhere, while some terminals do not pass on function keys or Alt.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from minillm.checks import check_names, shown
from minillm.errors import UsageError
from minillm.ui.dialogs import Dialog

LETTERS = {
    "help": "h", "find": "f", "new": "n", "sessions": "o", "model": "m", "sampling": "s", "system": "i", "theme": "t",
    "reload": "l", "edit": "e", "regenerate": "r", "continue": "c", "branch-previous": "b", "branch-next": "w",
    "undo": "u", "copy": "y", "probabilities": "p", "select-previous": "k", "select-next": "j", "pool": "1",
    "tables": "2", "strands": "3", "events": "4", "memory": "5", "steps": "6", "expand": "v", "editor": "x",
    "suspend": "z", "quit": "q", "wider": "+", "narrower": "-",
}  # name of an action -> its letter in the menu  # fmt: skip
_TWO_COLUMNS = 78  # minimum screen width in cells for a menu of two columns
_ARROWS = {"up": "↑", "down": "↓", "left": "←", "right": "→"}
_KEY = re.compile(r"(?:(?:ctrl|alt|shift|super|meta)\+)*[a-z0-9_]+")
_TYPED = re.compile(r"(?:shift\+)?(?:[a-z0-9]|[a-z]+_[a-z_]+|space|minus|plus|slash|comma|period)")


def checked_keymap(keymap: Mapping[str, object], bindings: Iterable[Binding]) -> dict[str, str]:
    """Check ``[keymap]``. Return it in Textual's format, action -> keys: ``{"edit": "ctrl+e,f12"}``.

    Raises:
        UsageError: an action or key is unknown, a key is needed for typing, or two actions have the same key.
    """
    defaults = keys_of(bindings)
    check_names(keymap, list(defaults), "[keymap] action")
    chosen = {name: _checked_keys(name, value) for name, value in keymap.items()}
    owners: dict[str, str] = {}
    for name, keys in {**defaults, **chosen}.items():
        for key in keys:
            other = owners.setdefault(key, name)
            if other != name:
                raise UsageError(f"[keymap] {key} is the key of both {other} and {name}: give one of them another")
    return {name: ",".join(keys) for name, keys in chosen.items()}


def named_bindings(*bindings: BindingType) -> list[Binding]:
    """Return the bindings that have a name."""
    return [each for each in bindings if isinstance(each, Binding) and each.id]


def keys_of(bindings: Iterable[Binding]) -> dict[str, list[str]]:
    """Return the default keys of each named action."""
    found: dict[str, list[str]] = {}
    for binding in bindings:
        if binding.id:
            found.setdefault(binding.id, []).extend(binding.key.split(","))
    return found


def bound_keys(keymap: Mapping[str, object], bindings: Iterable[Binding]) -> dict[str, list[str]]:
    """Return the keys of each named action, with the changes of ``[keymap]`` applied."""
    bindings = list(bindings)
    chosen = {name: keys.split(",") for name, keys in checked_keymap(keymap, bindings).items()}
    return {**keys_of(bindings), **chosen}


def shown_keys(*groups: Sequence[str]) -> str:
    """Return the keys of some actions for display: ``Ctrl+E, F12``, or ``Alt+← →`` for several arrows."""
    keys = [key for group in groups for key in group]
    heads = {key.rpartition("+")[0] for key in keys}
    lasts = [key.rpartition("+")[2] for key in keys]
    if len(keys) > 1 and len(heads) == 1 and all(last in _ARROWS for last in lasts):
        prefix = _shown_key(heads.pop())
        return f"{prefix}{'+' if prefix else ''}{' '.join(_ARROWS[last] for last in lasts)}"
    return ", ".join(map(_shown_key, keys))


def _shown_key(key: str) -> str:
    names = {**_ARROWS, "pageup": "Page Up", "pagedown": "Page Down"}
    return "+".join(names.get(part, part.capitalize()) for part in key.split("+"))


def _checked_keys(name: str, value: object) -> list[str]:
    keys = [value] if isinstance(value, str) else value
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise UsageError(f"[keymap] {name} must be a key or a list of keys, not {shown(value)}")
    for key in keys:
        if not _KEY.fullmatch(key):
            raise UsageError(f"[keymap] {name}: {shown(key)} is not a key; keys have names like ctrl+e, alt+left, f5")
        if _TYPED.fullmatch(key):
            raise UsageError(f"[keymap] {name}: {key} is needed for typing; use a key with ctrl or alt, or an F-key")
    return keys


class KeyMenu(Dialog[str]):
    """Lists all actions and their letters. Returns the name of the action with the letter that the user types."""

    def __init__(self, keys: Mapping[str, Sequence[str]]) -> None:
        """Create the menu. ``keys``: the keys of each action."""
        self._names = {letter: name for name, letter in LETTERS.items()}
        self._cells = [
            Content.assemble(f"  {letter}  ", (f"{name:<18}", "bold"), (f"{shown_keys(keys[name]):<12}", "$text-muted"))
            for letter, name in self._names.items()
        ]
        self._table = Static()
        super().__init__("actions", "Press a letter · Escape closes", self._table, scrolls=True)

    def on_resize(self, event: events.Resize) -> None:
        columns = 2 if event.size.width >= _TWO_COLUMNS else 1
        height = -(-len(self._cells) // columns)
        rows = [Content("").join(self._cells[at::height]) for at in range(height)]
        self._table.update(Content("\n").join(rows))

    def on_key(self, event: events.Key) -> None:
        if (name := self._names.get(event.character or "")) is not None:
            event.stop()
            self.dismiss(name)
