"""The help: keys of the focused widget, then all keys, then all commands."""

from collections.abc import Mapping, Sequence
from textwrap import wrap

from rich.cells import cell_len
from textual import events
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, Static

from minillm.ui.chat.answer_view import ReasoningView
from minillm.ui.chat.candidates import CandidateCard
from minillm.ui.chat.prompt import PromptInput
from minillm.ui.chat.slash import CommandTable
from minillm.ui.chat.transcript import Transcript
from minillm.ui.dialogs import Dialog
from minillm.ui.keymap import shown_keys

# Section of the help -> keys -> their meaning. A name in braces is replaced by keys: {stop} by the keys of that action,
# {scroll-up/scroll-down} by the keys of both actions, and {branch} by the keys of that slash command.
KEYS = {
    "Chat": {
        "Enter": "send",
        "@name, /name": "attach file; run command (↑ ↓ Tab choose)",
        "Ctrl+J, Alt+Enter": "new line (Shift+Enter in some terminals)",
        "{editor}": "edit in $EDITOR; Ctrl+_ undoes",
        "↑ ↓": "first or last line: earlier questions",
        "{stop}": "stop the answer, cancel loading or editing",
        "{interrupt}": "copy the selection, else stop; twice: quit",
        "{scroll-page-up/scroll-page-down}": "scroll by pages; {scroll-up/scroll-down} by lines",
        "{scroll-home/scroll-end}": "go to the beginning, to the end",
    },
    "Turns": {
        "{select-previous/select-next}": "select a turn (default: the last one)",
        "{edit}": "edit the question and ask again, as a branch",
        "{regenerate}": "regenerate the answer, as a branch",
        "{branch}": "switch between branches",
        "{continue}": "continue the last answer",
        "{accept}": "accept a candidate (empty prompt); {undo}: undo",
        "{copy}": "copy the answer; /copy code: its last code block",
        "{probabilities}": "show the answer's token probabilities",
    },
    "Conversations and settings": {
        "{new}, {sessions}": "new conversation; saved conversations",
        "{find}": "search: Enter or ↓ next match, ↑ previous match",
        "{model}, {sampling}, {system}": "model, sampling and beams, system prompt",
        "{theme}": "switch between light and dark",
        "Ctrl+P, /": "all commands; {menu}: all actions by letter",
        "{help}, ?": "this help (? in an empty prompt)",
        "{quit}": "quit; {suspend}: back to the shell",
    },
    "Memory": {
        "{pool}, {tables}, {strands}": "show pool, tables, strands; again: hide",
        "{events}, {memory}, {steps}": "show events, memory, steps",
        "{expand}": "the view in full screen, and back",
        "{wider/narrower}": "wider, narrower view; or drag its edge",
        "{next}": "go to the view; arrows move",
        "┃ │ ╎": "an answer's blocks: shared, own, being filled",
    },
}

# (class of widgets that can be focused, their name, keys that work only there -> their meaning).
_PLACES: tuple[tuple[type, str, Mapping[str, str]], ...] = (
    (PromptInput, "the prompt", KEYS["Chat"]),
    (CandidateCard, "a candidate", {
        "Enter": "accept it; the others become branches",
        "Space": "full screen, and back",
        "{next}": "next candidate",
        "↑ ↓": "scroll it",
    }),
    (Transcript, "the conversation", {
        "↑ ↓, Page Up, Page Down": "scroll",
        "{next}": "next place",
        "any letter": "type into the prompt",
    }),
    (Input, "a line of text", {"Tab, ↑ ↓": "next line, or choose in the list", "Escape": "close"}),
)  # fmt: skip


def keys_here(screen: Screen[object]) -> tuple[str, dict[str, str]]:
    """Return the name of the focused widget or dialog, and the keys that work only there, with their meanings."""
    focused, in_dialog = screen.focused, isinstance(screen, Dialog)
    name, keys = type(screen).__name__.removesuffix("Screen").lower(), dict[str, str]()
    for kind, place, known in _PLACES:
        if isinstance(focused, kind):
            name, keys = place, dict(known)
            break
    else:
        if focused is not None and not in_dialog:
            titles = [str(getattr(each, "border_title", "") or "") for each in focused.ancestors_with_self]
            name = "reasoning" if isinstance(focused.parent, ReasoningView) else next(filter(None, titles), name)
    for node, binding, enabled, _ in screen.active_bindings.values():
        is_own = node is not screen.app and (in_dialog or node is not screen)
        if is_own and enabled and binding.show and binding.description:
            keys.setdefault(screen.app.get_key_display(binding), binding.description)
    return name, keys


class _Shown(dict[str, str]):
    """Maps each name in braces in the texts of `KEYS` to the keys that are shown in its place."""

    def __init__(self, commands: CommandTable, bound: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self._commands, self._bound = commands, bound

    def __missing__(self, name: str) -> str:
        names = name.split("/")
        if name in self._commands and name not in self._bound:
            parts = [binding.id or "" for binding in self._commands[name].bindings()]
            if not parts:
                return self._commands[name].shown_key  # the prompt handles these keys itself, so they never change
            names = parts
        return shown_keys(*(self._bound[each] for each in names))


class HelpScreen(Dialog[None]):
    """Shows the keys of the widget that was focused, then all keys, then all commands."""

    def __init__(
        self, commands: CommandTable, here: tuple[str, Mapping[str, str]], bound: Mapping[str, Sequence[str]]
    ) -> None:
        """Create the help.

        Args:
            here: the result of `keys_here` before the help was opened.
            bound: the keys of each action, see `minillm.ui.keymap.bound_keys`.
        """
        keys_of = _Shown(commands, bound)
        usages = {command.usage: command.summary for command in commands.values()}
        name, keys_there = here
        first = {} if name == "the prompt" or not keys_there else {f"Here: {name}": keys_there}
        parts = {
            title: {key.format_map(keys_of): meaning.format_map(keys_of) for key, meaning in keys.items()}
            for title, keys in {**first, **KEYS, "Commands": usages}.items()
        }
        super().__init__("keys", "Escape closes", KeyTable(parts), scrolls=True)


class KeyTable(Static):
    """Shows keys and their meanings in two columns, in sections."""

    def __init__(self, parts: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__()
        self._parts = parts

    def on_resize(self, event: events.Resize) -> None:
        self.update(key_lines(self._parts, event.size.width))


def key_lines(parts: Mapping[str, Mapping[str, str]], width: int) -> Content:
    """Return the table of keys for ``width`` columns.

    A meaning of several lines stays in its column if the table is wide enough.
    """
    first = 28 if width >= 60 else 4
    lines: list[Content] = []
    for title, keys in parts.items():
        lines.append(Content.styled(title, "bold $text-primary"))
        for key, meaning in keys.items():
            head = f"  {key:<{first - 3}} " if cell_len(key) < first - 2 else f"  {key} "
            begin, *more = wrap(meaning, max(10, width - cell_len(head))) if cell_len(head) <= first else [""]
            if not begin:  # the key needs a line of its own
                more = wrap(meaning, max(10, width - first))
            lines.append(Content.assemble((head, "$foreground"), (begin, "$text-muted")))
            lines += [Content.styled(" " * first + line, "$text-muted") for line in more]
        lines.append(Content(""))
    return Content("\n").join(lines)
