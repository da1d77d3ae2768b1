"""Test random keys in `minillm chat` on a terminal: it keeps running, and ends normally."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from lib.gestures import something
from lib.terminal import CHAT, PROGRAMS, Session, session

STATE_DUMP = str(PROGRAMS / "state_dump.py")
SESSIONS = int(os.environ.get("SOAK_SESSIONS", "60"))
SIZES = [(80, 24), (130, 40), (40, 10), (200, 60), (20, 5)]


def type_at_random(running: Session, rng: random.Random) -> list[str]:
    """Type gestures, some in one go, some repeated, some after a while. Returns the keys typed."""
    typed: list[str] = []
    running.read(rng.choice([0.1, 0.5, 2.0]))
    held = ""
    for _ in range(rng.randint(30, 120)):
        if running.process.poll() is not None:
            break
        if rng.random() < 0.04:
            running.resize(*rng.choice(SIZES))
        held += something(rng) * rng.choice([1, 1, 1, 1, 2, 3])
        if rng.random() < 0.7:
            running.type(held)
            typed.append(held)
            held = ""
            running.read(rng.choice([0, 0, 0.02, 0.1, 0.4]))
    return typed


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("engine", ["scripted", "real"])
def test_random_keys(engine: str, tiny_model: Path, tmp_path: Path) -> None:
    for seed in range(SESSIONS):
        rng = random.Random(seed)
        options = ("--device", "cpu", "--num-blocks", "40", "--max-tokens", str(rng.choice([8, 60])))
        real = (sys.executable, STATE_DUMP, "chat", "--model", str(tiny_model), *options)
        environment = {"MINILLM_DATA": str(tmp_path), "MINILLM_CONFIG": str(tmp_path / "none.toml")}
        with session(real if engine == "real" else CHAT, size=rng.choice(SIZES), environment=environment) as running:
            typed = type_at_random(running, rng)
            running.wait_for_keys_taken()
            if running.process.poll() is None:
                for key in ("\x1b[27u", "\x1b[27u", "\x11", "\x11"):
                    running.type(key)
                    running.read(0.2)
            try:
                code = running.end(30)
            except AssertionError as error:
                raise AssertionError(f"session {seed} typed {typed}: {error}") from None
            story = f"session {seed} typed {typed} and showed {running.output[-2000:]!r}"
            assert code == 0, story
            assert b"internal error" not in running.output, story
            assert engine == "scripted" or b"the engine ended" not in running.output, story
            assert running.modes_left_on() == [], story
