"""Test compiled layers: kept on disk, compiled by one process per shape, with a message if compiling fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lib.models import in_4_bits, needs_products_of_8_bits
from minillm.loading import compiling
from minillm.model.llama import Llama
from minillm.model.one_token import CompiledLlama, OneToken

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
        return [path for path in self.cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


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
    assert isinstance(machine.load(model), CompiledLlama)
    assert isinstance(machine.load(model), CompiledLlama)
    assert loaded == [b"a library"] * 2
    assert machine.num_processes == 1
    assert machine.progress == [(0, 1), (1, 1)]
    assert not machine.messages
    machine.load(in_4_bits(intermediate_size=128))
    assert machine.num_processes == 2, "another shape has another library"


def test_a_damaged_library_is_removed_and_said(machine: Machine) -> None:
    assert not isinstance(machine.load(in_4_bits()), CompiledLlama)
    (message,) = machine.messages
    assert "cannot be read and is removed" in message
    assert not machine.files


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def flip_a_bit(path: Path) -> None:
    path.write_bytes(b"A library")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip_a_bit,
    "cut": lambda path: path.write_bytes(b"a lib"),
    "empty": lambda path: path.write_bytes(b""),
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "endless device": link_to("/dev/zero"),
    "loop": link_to("layer.pt2"),
    "link to nothing": link_to("/nonexistent"),
}


@pytest.mark.parametrize("of_checksum", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_damaged_since_is_not_loaded_and_compiled_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, damage: str, of_checksum: bool
) -> None:
    loaded: list[bytes] = []

    def load(path: Path, model: Llama) -> OneToken:
        loaded.append(path.read_bytes())
        return OneToken(lambda arguments: arguments, [])

    monkeypatch.setattr(OneToken, "load", load)
    machine.load(in_4_bits())
    (path,) = (each for each in machine.files if (each.suffix == ".sha256") == of_checksum)
    if damage not in ("flipped bit", "cut", "empty"):
        path.unlink()
    DAMAGES[damage](path)
    assert isinstance(machine.load(in_4_bits()), CompiledLlama)
    assert loaded == [b"a library"] * 2
    assert machine.num_processes == 2
    assert isinstance(machine.load(in_4_bits()), CompiledLlama)
    assert machine.num_processes == 2


def test_rests_of_a_killed_compilation_are_removed(machine: Machine) -> None:
    rest = machine.cache / "compiled" / "minillm-killed"
    rest.mkdir(parents=True)
    (rest / "half.cpp").write_text("int")
    machine.load(in_4_bits())
    assert not rest.exists()


def test_a_compilation_ends_with_the_process_that_wants_it() -> None:
    code = "import sys, time; from minillm.system import end_with_parent; end_with_parent(int(sys.argv[1]))"
    code += "; time.sleep(60)"
    started = subprocess.Popen([sys.executable, "-c", code, "1"], start_new_session=True)  # its parent is another
    assert started.wait(30) == -signal.SIGKILL


def test_without_a_compiler_it_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("MINILLM_CACHE", str(machine.cache))
    monkeypatch.setenv("CXX", str(machine.cache / "none"))
    assert not isinstance(machine.load(in_4_bits()), CompiledLlama)
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
    assert not isinstance(machine.load(in_4_bits()), CompiledLlama)
    (message,) = machine.messages
    assert words in message
    assert "enforce_eager" in message
    assert not machine.files


def test_a_directory_that_cannot_be_written_is_said(machine: Machine) -> None:
    (machine.cache / "compiled").write_text("a file")
    assert not isinstance(machine.load(in_4_bits()), CompiledLlama)
    (message,) = machine.messages
    assert "cannot be compiled" in message


def test_others_stay_as_they_are_without_a_word(machine: Machine) -> None:
    model = replace(in_4_bits(), kv_in_8_bits=True)
    assert machine.load(model) is model
    assert not [*machine.messages, *machine.progress]
    assert machine.num_processes == 0


def test_on_a_machine_with_a_gpu_nothing_is_compiled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch 2.11 crashed while it loaded a library. The model computes without one."""
    model = in_4_bits()
    monkeypatch.setattr(compiling.torch.cuda, "is_available", lambda: True)
    assert machine.load(model) is model
    assert (machine.num_processes, machine.messages, machine.files) == (0, [], [])
