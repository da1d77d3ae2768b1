"""Random gestures of a user: questions, commands, keys and clicks."""

from __future__ import annotations

import random

from minillm.ui.chat.commands import COMMANDS

FUNCTION_KEYS = ["\x1bOP", "\x1bOQ", "\x1bOR", "\x1bOS", *(f"\x1b[{n}~" for n in (15, 17, 18, 19, 20, 21, 23))]

ARROWS = [f"\x1b[{modifier}{key}" for modifier in ("", "1;2", "1;3", "1;5") for key in "ABCDHF"]

OTHER_KEYS = ["\x1b[27u", "\x1b[5~", "\x1b[6~", "\x1b[3~", "\x1b[Z", "\r", "\t", "\x7f", "?", *"0123456789"]

CONTROL = [chr(number) for number in range(1, 27) if chr(number) not in "\x03\x08\x09\x0a\x0d\x11"]

ALT = [f"\x1b{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]

KEYS = [*FUNCTION_KEYS * 2, *ARROWS, *OTHER_KEYS, *CONTROL, *ALT]

QUESTIONS = ["hello", "slow", "long", "hostile", "think", "never", "fail", "full", "echo **x** 😀 é", "a\nb", "a story"]


def something(rng: random.Random) -> str:
    """Return the keys of one gesture: a question, a command, a key, or a click."""
    kind = rng.choices(["question", "command", "key", "mouse"], [25, 20, 45, 6])[0]
    if kind == "question":
        return rng.choice(QUESTIONS) + "\r"
    if kind == "command":
        command = rng.choice([each for name, each in COMMANDS.items() if name not in ("quit", "export")])
        return f"/{command.name}{rng.choice(['', ' 3', ' 1', ' x', ' 0.5'])}\r"
    if kind == "key":
        return rng.choice(KEYS)
    at = f"{rng.choice([0, 0, 2, 64, 65])};{rng.randint(1, 130)};{rng.randint(1, 40)}"
    return f"\x1b[<{at}M\x1b[<{at}m"
