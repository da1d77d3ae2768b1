"""A scripted engine: it speaks the messages of `minillm.service` and computes nothing. The question chooses the events.

Run it as a program. ``echo …`` answers with the words after it; the other commands stand in `answer`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from io import BufferedRWPair
from itertools import repeat

from msgspec.structs import asdict, replace

from minillm.progress import Progress
from minillm.service.messages import (
    Abort,
    BeamsChanged,
    BeamView,
    BlockFacts,
    CacheChanged,
    ContextFull,
    Event,
    Finished,
    Forget,
    Generate,
    Inspect,
    Keep,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    LogEntry,
    Notice,
    RequestFailed,
    Started,
    TableState,
    TableView,
    TextDelta,
    TokenChoice,
    decode_command,
    encode,
)
from minillm.system import parent_socket

HOSTILE = (
    "red \x1b[31mtext\x1b[0m, title \x1b]0;owned\x07, clipboard \x1b]52;c;ZWNobyBvd25lZA==\x07, report \x1b[6n, "
    "eight-bit \x9b31m \x9d52;c;YQ==\x9c, return\rback, bell \x07, bidi \u202egnp.exe, zero\u200bwidth, "
    "entity &#x1b;[31m &#x202e;, [/INST] [b [bold]markup[/bold] [@click=app.quit]x[/], "
    "[link](javascript:alert(1)), ![picture](file:///etc/passwd), <b>html</b>, <https://a.example/%1b[31m>\n\n"
    "```\x1b[31m\ncode \x1b[31mred\x9b0m\n```\n"
)
LOADED = Loaded(
    model="fake",
    source="a script",
    device="cpu",
    dtype="float32",
    max_model_len=1000,
    block_size=16,
    num_blocks=64,
    num_host_blocks=8,
    block_bytes=1024,
    has_chat_template=True,
    seconds=0.1,
)

_stream: BufferedRWPair  # to the app
_write = threading.Lock()
_aborted: set[str] = set()


def send(event: Event) -> None:
    with _write:
        _stream.write(encode(event))
        _stream.flush()


def picture(owner: str, state: TableState, num_tokens: int) -> None:
    blocks = list(range(3, 3 + -(-num_tokens // 16)))
    send(
        CacheChanged(
            tables=[TableView(1, owner, 0, state, num_tokens, blocks)],
            log=[LogEntry(1.0, "allocate", 1, owner, blocks[-1:])],
        )
    )


def empty_pool() -> None:
    send(CacheChanged(gone=[1]))


def answer(command: Generate) -> None:
    name, question = command.request_id, command.messages[-1]["content"]
    word = question.split()[0]
    if "beam_width" in command.params:
        beams(name, command.params["beam_width"])
    elif command.params.get("reasoning_depths"):
        depths(name, command.params["reasoning_depths"], command.params["max_reasoning_tokens"])
    elif command.params.get("n", 1) > 1:
        samples(name, command.params["n"])
    elif word == "crash":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    elif word == "garbage":
        with _write:
            _stream.write(b"this is no message\n")
            _stream.flush()
    elif word == "fail":
        send(RequestFailed(name, "the request \x1b[31mbroke"))
    elif word == "full":
        send(ContextFull(name, 1200, 1000))
    elif word == "fit" and len(command.messages) > 1:
        send(ContextFull(name, 990, 1000))
    elif word == "think":
        stream(name, ["<thi", "nk>let me ", "see</th", "ink>\n\nfour"])
    elif word == "thinks?":
        stream(name, [repr(command.thinks)])
    elif word == "slow":
        stream(name, ["word "] * 400, pause=0.02)
    elif word == "endless":
        stream(name, repeat("word "), pause=0.02)
    elif word == "never":
        while name not in _aborted:
            time.sleep(0.01)
        send(Finished(name, 0, "abort", 0, 0.0, 20))
    elif word == "hostile":
        stream(name, [HOSTILE[i : i + 3] for i in range(0, len(HOSTILE), 3)])
    elif word == "long":
        stream(name, [f"Paragraph {i} of *many*.\n\n" for i in range(200)])
    elif word == "messages":
        stream(name, [f"{message['role']}={message['content']};" for message in command.messages])
    elif word == "params":
        stream(name, ["`" + repr(sorted(command.params.items())) + "`"])
    else:
        stream(name, list(question.removeprefix("echo ")))
    if word not in ("garbage", "fail", "full", "never"):
        picture(name, "idle", 40)


def samples(name: str, count: int) -> None:
    """Let each say its number, one word more than the one before it. Five of them go on until they are stopped."""
    send(Started(name, 20, 4, 0.05))
    ended: set[int] = set()
    for round_number in range(1, 3000):  # a minute: a busy machine may be slow to stop them
        for index in range(count):
            if index in ended:
                continue
            if name in _aborted or (count < 5 and round_number > index + 1):
                ended.add(index)
                send(Finished(name, index, "abort" if name in _aborted else "stop", round_number, 50.0, 20))
            else:
                send(TextDelta(name, index, f"sample{index + 1} ", 1, choices()))
        if len(ended) == count:
            return
        time.sleep(0.02)


def depths(name: str, shallow: list[int], deepest: int) -> None:
    """Let one thought go on word by word. At each depth an answer forks from it; the last depth is never reached."""
    send(Started(name, 20, 4, 0.05, in_reasoning=True))
    for number in range(1, deepest):
        send(TextDelta(name, len(shallow), "hm ", 1))
        if number in shallow:
            index = shallow.index(number)
            send(TextDelta(name, index, f"{'hm ' * number}Enough.</think>", number + 2, num_shared=number))
            send(TextDelta(name, index, f"answer {index + 1}", 2))
            send(Finished(name, index, "stop", number + 4, 50.0, 20))
    send(TextDelta(name, len(shallow), "</think>the last answer", 4))
    send(Finished(name, len(shallow), "stop", deepest + 3, 50.0, 20))


def beams(name: str, width: int) -> None:
    """Let them overtake each other once."""
    send(Started(name, 20, 4, 0.05))
    views = [BeamView(f"beam {i}", -0.1 * i, -1.0 * i, 10, False) for i in range(1, width + 1)]
    send(BeamsChanged(name, views))
    time.sleep(0.2)
    final = [BeamView(f"beam {i} ends", -0.1 * i, -1.0 * i, 12, True) for i in range(width, 0, -1)]
    send(BeamsChanged(name, final))
    for index in range(width):
        send(Finished(name, index, "stop", 12, 50.0, 32))


def choices() -> list[TokenChoice]:
    return [TokenChoice("a\x1b[31m", -0.05, ["a\x1b[31m", "b"], [-0.05, -3.0])]


def stream(name: str, pieces: Iterable[str], pause: float = 0.0) -> None:
    send(Started(name, 20, 4, 0.05))
    number = 0
    for number, piece in enumerate(pieces, 1):
        if name in _aborted:
            send(Finished(name, 0, "abort", number, 50.0, 20 + number))
            return
        picture(name, "running", 20 + min(number, 400))
        send(TextDelta(name, 0, piece, 1, choices()))
        time.sleep(pause)
    send(Finished(name, 0, "stop", number, 50.0, 20 + number))


def load(command: Load) -> bool:
    """Load the model, or fail as its name asks; False if it cannot be loaded."""
    send(Loading(Progress("loading weights", 1, 3, "layers")))
    if command.model == "missing":
        send(LoadFailed("no such model \x1b[31mhere", 1))
        return False
    if command.model == "forever":
        time.sleep(600)
    send(Notice("served \x1b[31mby a script"))
    template, switch = command.model != "base", command.model == "thinker"
    tags = command.model in ("thinker", "tags")
    facts = {"has_thinking_switch": switch, "has_reasoning_tags": tags}
    send(replace(LOADED, model=command.model, has_chat_template=template, **facts))
    send(CacheChanged())
    return True


def main() -> None:
    global _stream
    _stream = parent_socket().makefile("rwb")
    log = os.environ.get("FAKE_ENGINE_LOG")
    for line in _stream:
        command = decode_command(line)
        if log:
            with open(log, "a", encoding="utf-8") as file:
                print(os.getpid(), type(command).__name__, asdict(command), file=file)
        if isinstance(command, Load):
            if not load(command):
                return
        elif isinstance(command, Abort):
            _aborted.add(command.request_id)
        elif isinstance(command, Forget):
            empty_pool()
        elif isinstance(command, Keep):
            picture(command.request_id, "idle", 40)
        elif isinstance(command, Inspect):
            send(BlockFacts(command.block, ["to\x1b[31mken"], 7, "", 1.0))
        elif isinstance(command, Generate):
            threading.Thread(target=answer, args=(command,), daemon=True).start()


if __name__ == "__main__":
    main()
