"""Compiled layers are kept: one process for each shape of a layer, and what hinders it is said."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support import in_4_bits, needs_products_of_8_bits

from minillm.model.llama import Llama
from minillm.model.one_token import OneToken
from minillm.runner import compiling

pytestmark = needs_products_of_8_bits


@dataclass
class Machine:
    """A cache of its own, and a process that writes ``content`` and ends with ``code`` and ``stderr``."""

    cache: Path
    content: bytes | None = b"a library"
    code: int = 0
    stderr: str = ""
    messages: list[str] = field(default_factory=list)
    progress: list[tuple[int, int | None]] = field(default_factory=list)
    num_processes: int = 0

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.num_processes += 1
        if self.content is not None:
            Path(json.loads(options["input"])["path"]).write_bytes(self.content)
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)

    def load(self, model: Llama) -> Llama:
        return compiling.with_compiled_layers(
            model, lambda each: self.progress.append((each.done, each.total)), self.messages.append
        )

    @property
    def files(self) -> list[Path]:
        return [path for path in self.cache.rglob("*") if path.is_file()]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling.subprocess, "run", machine.run)
    monkeypatch.setattr(compiling, "compiler", lambda: "/usr/bin/c++")
    return machine


def test_a_second_start_compiles_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []

    def load(path: Path, model: Llama) -> OneToken:
        loaded.append(path.read_bytes())
        return OneToken(lambda arguments: arguments, [])

    monkeypatch.setattr(OneToken, "load", load)
    model = in_4_bits()
    assert machine.load(model).one_token is not None
    assert machine.load(model).one_token is not None
    assert loaded == [b"a library"] * 2
    assert machine.num_processes == 1
    assert machine.progress == [(0, 1), (1, 1)]
    assert not machine.messages
    machine.load(in_4_bits(intermediate_size=128))
    assert machine.num_processes == 2, "another shape has another library"


def test_a_damaged_library_is_removed_and_said(machine: Machine) -> None:
    assert machine.load(in_4_bits()).one_token is None
    (message,) = machine.messages
    assert "cannot be read and is removed" in message
    assert not machine.files


def test_without_a_compiler_it_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("MINILLM_CACHE", str(machine.cache))
    monkeypatch.setenv("CXX", str(machine.cache / "none"))
    assert machine.load(in_4_bits()).one_token is None
    (message,) = machine.messages
    assert message.startswith("no C++ compiler")


@pytest.mark.parametrize(
    ("content", "code", "stderr", "words"),
    [(None, 0, "", "exit code 0"), (b"half", 1, "compiling\nld: no space\n", "(ld: no space)")],
)
def test_a_process_that_fails_leaves_nothing(
    machine: Machine, content: bytes | None, code: int, stderr: str, words: str
) -> None:
    machine.content, machine.code, machine.stderr = content, code, stderr
    assert machine.load(in_4_bits()).one_token is None
    (message,) = machine.messages
    assert words in message
    assert "enforce_eager" in message
    assert not machine.files


def test_a_directory_that_cannot_be_written_is_said(machine: Machine) -> None:
    (machine.cache / "compiled").write_text("a file")
    assert machine.load(in_4_bits()).one_token is None
    (message,) = machine.messages
    assert "cannot be compiled" in message


def test_others_stay_as_they_are_without_a_word(machine: Machine) -> None:
    model = replace(in_4_bits(), kv_in_8_bits=True)
    assert machine.load(model) is model
    assert not [*machine.messages, *machine.progress]
    assert machine.num_processes == 0
