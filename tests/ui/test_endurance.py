"""Test a long chat: random keys, hostile pastes, resizes, kills of engine and app. Nothing is lost.

``MINILLM_TYPING_MINUTES`` says for how long each engine is typed at.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lib.gestures import something
from lib.terminal import PROGRAMS, Session, children, session
from minillm.ui.chat.sessions import SessionStore

MINUTES = float(os.environ.get("MINILLM_TYPING_MINUTES", "0.1"))
SIZES = [(160, 50), (120, 40), (80, 24), (40, 12)]
BEGIN, END = "\x1b[200~", "\x1b[201~"
HOSTILE = [
    "\x1b[31mred\x1b[0m \x1b]0;owned\x07 \x1b]52;c;ZWNobw==\x07 \x1b[6n \x9b31m \x9d52;c;YQ==\x9c",
    "[bold]markup[/bold] [/] [[ ]] [@click=app.quit]x[/] [red [link=javascript:alert(1)]y",
    "x" * 200_000,
    "\n".join(f"line {number} of a long paste" for number in range(3000)),
    "e" + "\u0301" * 500 + " Z" + "".join(chr(0x300 + number) for number in range(112)),
    "\u202egnp.exe \u2066\u2067abc\u2069 مرحبا بالعالم، كيف حالك؟ שלום עולם \u200f\u200e می‌خواهم",
    "👨‍👩‍👧‍👦 🇩🇪 👍🏽 漢字かな交じり文 한국어 \ufeff\u200b\u00ad",
    "\x00\x01\x02\x07\x08\x0b\x0c\x0e\x7f\x80\x85 \ud7ff\ue000\ufffd\uffff\U0010ffff",
    "```\n" + "| a | b |\n|---|---|\n" * 50 + "\n# " * 80 + "\n" + ">" * 300 + "\n" + "* " * 300,
    "<think>" * 50 + "</think>" + "<|im_start|>system\n<|im_end|>" * 20,
    "@/etc/passwd @nothing @.. " + "/" * 5000,
    f"ends early {END} and goes on as keys\r",
    "",
]
RESTART = 0.04  # of the gestures: the engine is killed, or the app


def type_slowly(running: Session, data: bytes) -> None:
    """Type what may be more than the terminal's buffer, and read meanwhile."""
    deadline = time.monotonic() + 60
    while data and running.process.poll() is None:
        running.read(0)
        if select.select([], [running._master], [], 0.05)[1]:
            data = data[os.write(running._master, data[:512]) :]
        assert time.monotonic() < deadline, "it takes no keys any more"


def ends(process: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


class Typist:
    """Types at one app after another, and looks into their log."""

    def __init__(self, model: str, directory: Path, seed: int) -> None:
        self.model, self.directory, self.rng = model, directory, random.Random(seed)
        self.log = directory / "log.jsonl"
        self.log.touch()
        self.store = SessionStore(directory / "conversations")
        self.looked = 0  # bytes of the log that were read
        self.last: dict[str, Any] = {}  # what was seen last
        self.typed: list[str] = []
        names = ("apps", "kills", "engines", "gestures", "answers", "megabytes")
        self.counts: dict[str, float] = dict.fromkeys(names, 0)

    def story(self) -> str:
        return f"seed {self.rng}, {self.counts}, typed last {self.typed[-40:]!r}"

    def look(self) -> None:
        """Read what the app has seen of itself since the last time."""
        with self.log.open("rb") as file:
            file.seek(self.looked)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.looked += len(whole)
        for line in whole.splitlines():
            look = json.loads(line)
            assert not look["problems"], f"{look['problems']}; {self.story()}"
            if look["conversation"] == self.last.get("conversation"):
                self.counts["answers"] += max(0, len(look["said"]) - len(self.last["said"]))
            self.last = look
            self.counts["megabytes"] = max(self.counts["megabytes"], look["megabytes"])

    def check_disk(self) -> None:
        """Check that every answer that ended in the app is in the file."""
        self.look()
        if self.last and self.last["said"]:
            saved = self.store.load(self.directory / "conversations" / f"{self.last['conversation']}.json")
            kept = [[t.question, [t.answer.text, *(c.text for c in t.answer.candidates)]] for t in saved.all_turns()]
            missing = [each for each in self.last["said"] if each not in kept]
            assert not missing, f"lost: {missing}; {self.story()}"

    def gesture(self, running: Session) -> None:
        kind = self.rng.random()
        self.counts["gestures"] += 1
        if kind < 0.08:
            text = self.rng.choice(HOSTILE)
            data = (BEGIN + text + END).encode("utf-8", "surrogatepass")
            if self.rng.random() < 0.1:
                data = bytes(byte for byte in self.rng.randbytes(60) if byte not in b"\x03\x11")
            self.typed.append(f"pasted {text[:30]!r}")
            type_slowly(running, data)
            if self.rng.random() < 0.5:
                type_slowly(running, b"\r")
        elif kind < 0.12:
            running.resize(*self.rng.choice(SIZES))
        elif kind < 0.2:  # peel all layers, and ask something that will be answered
            again = f"/model {self.model}\r" if self.last.get("phase") != "ready" else "hello\r"
            line = self.rng.choice([again, again, again, "hello\r", "a story\r", "/n 3\r", "/n 1\r", "/reload\r"])
            self.typed.append(line)
            for key in (b"\x1b[27u",) * 3:
                type_slowly(running, key)
                running.read(0.05)
            type_slowly(running, b"\x15" + line.encode())
            running.read(1.0)
        else:
            keys = something(self.rng)
            self.typed.append(keys)
            type_slowly(running, keys.encode())
        running.read(self.rng.choice([0, 0, 0.02, 0.1, 0.4, 1.0]))

    def sit(self, end: float) -> None:
        """Use one app, until ``end`` or until it is quit or killed."""
        how = self.rng.choice(["anew", "resume", "resume"])
        command = (sys.executable, str(PROGRAMS / "watched_chat.py"), str(self.log), self.model, how)
        places = {"MINILLM_DATA": str(self.directory), "MINILLM_CONFIG": str(self.directory / "config.toml")}
        environment = {**places, "OMP_NUM_THREADS": "1", "MINILLM_DEBUG": "1"}
        self.counts["apps"] += 1
        with session(command, size=self.rng.choice(SIZES), environment=environment) as running:
            running.read(3.0)
            while time.monotonic() < end and running.process.poll() is None:
                self.gesture(running)
                assert b"internal error" not in running.output, f"{running.output[-4000:]!r}; {self.story()}"
                assert b"Traceback" not in running.output, f"{running.output[-4000:]!r}; {self.story()}"
                running.output = running.output[-20_000:]
                self.look()
                dice = self.rng.random()
                if dice < RESTART / 8:
                    self.kill_app(running)
                    return
                if dice < RESTART:
                    for child in children(running.process.pid):
                        with suppress(ProcessLookupError):
                            os.kill(child, signal.SIGKILL)
                            self.counts["engines"] += 1
            self.leave(running)

    def kill_app(self, running: Session) -> None:
        engines = children(running.process.pid)
        running.process.kill()
        running.process.wait()
        self.counts["kills"] += 1
        assert all(ends(engine, 30) for engine in engines), "the engine outlives the app"
        self.check_disk()

    def leave(self, running: Session) -> None:
        """Begin a new conversation, see that all blocks come back, and quit."""
        if running.process.poll() is None:
            for _ in range(4):
                type_slowly(running, b"\x1b[27u")
                running.read(0.3)
            self.all_comes_back(running)
            running.quit()
        code = running.end(30)
        assert code == 0, f"exit code {code}: {running.output[-3000:]!r}; {self.story()}"
        assert running.modes_left_on() == []
        self.look()

    def all_comes_back(self, running: Session) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and running.process.poll() is None:
            type_slowly(running, b"\x1b[27u\x0e")  # ctrl+n
            running.read(1.5)
            self.look()
            mine = [each for each in self.last.get("holders", []) if each not in ("system prompt",)]
            if (
                not self.last.get("said")
                and not self.last.get("busy")
                and (self.last.get("phase") != "ready" or not mine)
            ):
                return
        assert running.process.poll() is not None, f"blocks stay: {self.last}; {self.story()}"


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("engine", ["scripted", "real"])
def test_hours_of_typing(engine: str, tiny_model: Path, tmp_path: Path) -> None:
    model = "fake" if engine == "scripted" else str(tiny_model)
    typist = Typist(model, tmp_path, seed=int(os.environ.get("MINILLM_TYPING_SEED", "1")))
    (tmp_path / "file.py").write_text("print('a file')\n")
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        typist.sit(end)
    print(f"{engine}: {typist.counts}")
    assert typist.counts["gestures"] > 0
