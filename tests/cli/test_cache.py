"""`minillm cache`, and how deleting a model removes its blocks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.block_files import chain, spoil, write
from minillm.blockstore.files import BlockStore, homes, listed
from minillm.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("MINILLM_DISK_CACHE", str(tmp_path / "blocks"))
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def filled(tmp_path: Path, model: str, count: int) -> BlockStore:
    about = {"model": model, "dtype": "float32", "block_size": 16}
    store = BlockStore(tmp_path / "blocks", model.encode().ljust(32), about, 1 << 30)
    for key in chain(list(range(count))):
        write(store, key)
    return store


def test_blocks_are_listed_by_model(run: Run, tmp_path: Path) -> None:
    assert run("cache") == (0, run("cache", "list")[1], "")
    assert "0 B" in run("cache")[1]
    filled(tmp_path, "one", 3)
    filled(tmp_path, "\x1b[31mtwo", 1)
    rows = [json.loads(line) for line in run("cache", "--json")[1].splitlines()]
    found = [(row["model"], row["blocks"], row["bytes"]) for row in rows]
    assert found == [("\x1b[31mtwo", 1, 5064), ("one", 3, 15192)]
    out = run("cache")[1].splitlines()
    assert out[2].split()[:6] == ["one", "float32", "3", "48", "15", "KiB"]
    assert "\x1b" not in out[1]


def test_damaged_blocks_are_found_and_removed(run: Run, tmp_path: Path) -> None:
    store = filled(tmp_path, "one", 3)
    assert run("cache", "verify") == (0, "3 blocks read: 0 were damaged and are removed\n", "")
    spoil(Path(store.path(chain([0, 1, 2])[1])), random.Random(1))
    assert run("cache", "verify") == (1, "3 blocks read: 1 were damaged and are removed\n", "")
    assert len(list(listed(store.root))) == 2


def test_blocks_are_trimmed_to_a_size_and_cleared(run: Run, tmp_path: Path) -> None:
    store = filled(tmp_path, "one", 10)
    code, out, _ = run("cache", "trim", "30KB")
    assert (code, out) == (0, "25 KiB are free again\n")
    assert [store.has(key) for key in chain(list(range(10)))] == [True] * 5 + [False] * 5, "the tail goes first"
    assert run("cache", "clear")[0] == 0
    assert homes(store.root) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("trim",), "needs a size"),
        (("clear", "5GB"), "other actions have none"),
        (("clear", "all"), "other actions have none"),
        (("trim", "lots"), "must be a size"),
        (("trun",), "known: list, verify, trim, clear"),
    ],
)
def test_wrong_arguments_are_reported(run: Run, arguments: tuple[str, ...], reason: str) -> None:
    code, out, error = run("cache", *arguments)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert reason in error


def test_deleting_a_model_removes_its_blocks(run: Run, tmp_path: Path) -> None:
    kept, gone = filled(tmp_path, "one", 2), filled(tmp_path, "org/two", 2)
    model = tmp_path / "models" / "org--two"
    model.mkdir(parents=True)
    (model / "minillm.json").write_text("{}")
    assert run("rm", "org/two")[0] == 0
    assert homes(kept.root) == [kept.home]
    assert not gone.home.exists()
