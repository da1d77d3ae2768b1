"""Slash commands: what can be typed in the prompt, what the palette offers, and what the help lists. One table."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.errors import UsageError, nearest


@dataclass(frozen=True)
class SlashCommand:
    """``/name argument``. ``action`` is the chat screen's method, which takes the argument, a text."""

    name: str
    summary: str
    action: str
    argument: str = ""  # what it takes, for people; in brackets where it may be left out
    key: str = ""  # that does the same

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


COMMANDS = (
    SlashCommand("help", "all keys and commands", "do_help", key="F1"),
    SlashCommand("new", "begin a new conversation; the old one is kept on disk", "do_new", key="Ctrl+N"),
    SlashCommand("sessions", "saved conversations: search, resume, delete", "do_sessions", "[words]", "Ctrl+O"),
    SlashCommand("export", "write the conversation to a file, .md or .json", "do_export", "FILE"),
    SlashCommand("edit", "change the selected question and ask again, as a branch", "do_edit", key="Alt+E"),
    SlashCommand("regenerate", "another answer to the selected question, as a branch", "do_regenerate", key="Alt+R"),
    SlashCommand("continue", "go on with the last answer", "do_continue", key="Alt+C"),
    SlashCommand("branch", "show the next branch here, or the previous one", "do_branch", "[next|previous]", "Alt+→ ←"),
    SlashCommand("accept", "take candidate N; the others' blocks are freed", "do_accept", "N", "1 … 9"),
    SlashCommand("copy", "copy the selected answer, or its last code block", "do_copy", "[code]", "Alt+Y"),
    SlashCommand("probabilities", "the answer's tokens by probability", "do_probabilities", key="Alt+P"),
    SlashCommand("model", "choose another model", "do_model", "[NAME]", "F2"),
    SlashCommand("reload", "load the model again", "do_reload", key="Ctrl+R"),
    SlashCommand("sampling", "temperature, top-p, beams and their like", "do_sampling", key="F3"),
    SlashCommand("set", "change one parameter", "do_set", "NAME VALUE"),
    SlashCommand("n", "answers to choose from", "do_n", "N"),
    SlashCommand("beams", "beam search with N beams; 1: sample again", "do_beams", "N"),
    SlashCommand("system", "what the model is told first; its blocks are pinned", "do_system", "[TEXT]", "F4"),
    SlashCommand("pool", "every block of the cache", "do_pool", key="F5"),
    SlashCommand("tables", "the block tables", "do_tables", key="F6"),
    SlashCommand("tree", "who shares which blocks with whom", "do_tree", key="F7"),
    SlashCommand("events", "allocate, fork, copy on write, free, hit, evict, swap", "do_events", key="F8"),
    SlashCommand("memory", "what is used, shared, cached and wasted", "do_memory", key="F9"),
    SlashCommand("steps", "what each step did, and where its time went", "do_steps", key="F10"),
    SlashCommand("theme", "light or dark", "do_theme", "[light|dark]", "Ctrl+T"),
    SlashCommand("quit", "leave the chat", "do_quit", key="Ctrl+Q"),
)


def parse(text: str) -> tuple[SlashCommand, str]:
    """The command that a line calls, and its argument. A beginning that only one command has is enough.

    Raises:
        UsageError: there is none of that name, or it lacks its argument; names the nearest.
    """
    name, _, argument = text.removeprefix("/").strip().partition(" ")
    names = [command.name for command in COMMANDS]
    begun = [command for command in COMMANDS if command.name.startswith(name.lower())] if name else []
    exact = [command for command in begun if command.name == name.lower()]
    if exact or len(begun) == 1:
        command = (exact or begun)[0]
        if command.argument and not command.argument.startswith("[") and not argument.strip():
            raise UsageError(f"/{command.name} needs its argument: {command.usage}")
        return command, argument.strip()
    if begun:
        raise UsageError(f"/{name} may be {', '.join('/' + command.name for command in begun)}")
    close = nearest(name, names)
    raise UsageError(f"there is no /{name}" + (f", did you mean /{close}?" if close else "; /help lists all"))


def is_command(text: str) -> bool:
    """Whether what was typed is for `parse`: a slash begins it. Two slashes begin a question that begins with one."""
    return text.startswith("/") and not text.startswith("//")


def unescaped(text: str) -> str:
    """The question that a text asks which is no command."""
    return text[1:] if text.startswith("//") else text


def completions(text: str) -> list[SlashCommand]:
    """The commands that a half-typed line may become; none once its name is complete and an argument begins."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:].lower())]
