"""Run every command and Python block of README.md, CONTRIBUTING.md and docs/, and compare the output.

The convention for a page. A fence has one of these names, and no other:

- ``sh``: shell commands. Each runs in bash with exit code 0; comments and lines that end in a backslash are fine.
  Commands use a tiny model with random weights: it replaces the default model, every named model of weights.toml, and
  the hub repository in `commands.HUB_MODEL`. So use sh for commands whose output the page does not show.
- ``console``: a line that begins with ``$ `` is a command. The lines after it are its output (stdout and stderr), which
  is compared. The default model is the real one, and no other is downloaded. This costs about two seconds for each
  command that loads a model.
- ``python``: runs on the real default model. The blocks of a page share their names, in the page's order, so load
  ``llm = LLM("smollm2-135m")`` once. ``LLM`` without options is the one of the whole test suite: do not close it.
- ``text`` right after ``python``: the block's output, which is compared.
- ``text``, ``toml``, ``json`` elsewhere: shown, not run. TOML and JSON must parse. Source excerpts are ``text``.

Expected output is what the default model's weights of the Python package give on a CPU in float32, seeds included; with
other weights of that model, only the exit is checked. ``…`` stands for any text: use it for paths, times, versions.

Commands run in a copy of the checkout's top level (`examples/`, `docs/`, …) with the files of tests/docs/files/
(prompts.jsonl, notes.txt, spider.json), so a page can use them. What a command writes there is gone afterwards.
``minillm serve …`` runs in the background until the next one, or the page's end, on a free port. Later commands and
blocks that say ``localhost:8000`` or ``127.0.0.1:8000`` reach it. It loads the real default model unless it names one.
``export NAME=VALUE`` holds for the rest of the page.

A command that cannot run in `make test` is listed in docs/not-run.toml, with a reason and the date when somebody last
ran it by hand. There are at most `MOST_NOT_RUN` entries. ``command`` is the whole command without its comment; ``*`` in
it matches anything. A listed `minillm` command must still parse.
"""

from __future__ import annotations

import ast
import datetime
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import minillm.llm
from lib.commands import Shell
from lib.fences import fences_of, matches, normalized, steps_of
from minillm.cli.main import command_parser
from minillm.llm import LLM
from minillm.weights.files import find_downloaded
from minillm.weights.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.exists()
]
RUN, SHOWN = {"sh", "console", "python"}, {"text", "toml", "json"}
MOST_NOT_RUN = 15
NOT_RUN: list[dict[str, Any]] = tomllib.loads((ROOT / "docs/not-run.toml").read_text(encoding="utf-8"))["command"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_listed(command: str) -> dict[str, Any] | None:
    """The entry of docs/not-run.toml for a command."""
    for entry in NOT_RUN:
        pattern = re.escape(normalized(entry["command"])).replace(r"\*", ".*")
        if re.fullmatch(pattern, command, re.DOTALL):
            return entry
    return None


def pages_that_run() -> Iterator[Any]:
    for page in PAGES:
        kinds = {fence.kind for fence in fences_of(page)}
        if kinds & RUN:
            marks = [pytest.mark.weights] if kinds & {"python", "console"} else []
            yield pytest.param(page, id=name_of(page), marks=marks)


@pytest.fixture(scope="module")
def is_read() -> bool:
    """Return whether the default model's weights are those of the pages' output. A hub's differ in last digits."""
    files = find_downloaded(load_manifest().default)
    return files is not None and files.source.startswith("the package")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Shell]:
    """A directory to run commands in, and the tiny models."""
    with Shell.made(tmp_path_factory.mktemp("pages"), ROOT, tiny_model) as made:
        yield made


@pytest.mark.parametrize("page", list(pages_that_run()))
def test_all_that_a_page_shows_runs(
    page: Path,
    shell: Shell,
    is_read: bool,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}

    def shared(model: str | None = None, **options: Any) -> LLM:
        if options or model not in (None, "smollm2-135m"):
            return LLM(model, **options)
        found: LLM = request.getfixturevalue("llm")
        found.reset_prefix_cache()
        return found

    monkeypatch.setattr(minillm.llm, "LLM", shared)
    with shell.page() as directory:
        monkeypatch.chdir(directory)
        fences = fences_of(page)
        for fence, following in zip(fences, [*fences[1:], None], strict=True):
            where = f"{name_of(page)}:{fence.line}"
            if fence.kind == "python":
                source = shell.reachable(fence.text)
                exec(compile(ast.parse(source, where), where, "exec"), names)
                output = capsys.readouterr().out
                if is_read and following is not None and following.is_output_of(fence):
                    assert matches(following.text, output), f"{where} printed:\n{output}"
            elif fence.kind in ("sh", "console"):
                for command, expected in steps_of(fence):
                    if is_listed(command):
                        continue
                    output = shell.run(command, where, real=fence.kind == "console")
                    if is_read and expected:
                        assert matches(expected, output), f"{where}: {command} printed:\n{output}"
    if "llm" in names:
        assert names["llm"].cache_stats().used_blocks == 0, f"{name_of(page)} leaves blocks in use"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_keeps_the_convention(page: Path) -> None:
    for fence in fences_of(page):
        where = f"{name_of(page)}:{fence.line}"
        assert fence.kind in RUN | SHOWN, f"{where}: a fence is one of {sorted(RUN | SHOWN)}, not {fence.kind!r}"
        if fence.kind == "toml":
            tomllib.loads(fence.text)
        elif fence.kind == "json":
            json.loads(fence.text)
        elif fence.kind == "console":
            assert fence.text.startswith("$ "), f"{where}: a console fence begins with '$ '"
    text = page.read_text(encoding="utf-8")
    # The package `minillm` of the public index is another project.
    assert not re.search(r"(pip|uv tool|pipx) install (--upgrade )?minillm\b", text), name_of(page)


def test_the_list_of_commands_that_do_not_run_is_short_and_true() -> None:
    assert len(NOT_RUN) <= MOST_NOT_RUN
    commands = [
        command
        for page in PAGES
        for fence in fences_of(page)
        if fence.kind in ("sh", "console")
        for command, _ in steps_of(fence)
    ]
    used = [is_listed(command) for command in commands]
    for entry in NOT_RUN:
        assert set(entry) == {"command", "reason", "run"}, entry
        assert entry["reason"]
        assert isinstance(entry["run"], datetime.date), entry
        assert any(found is entry for found in used), f"no page has the command {entry['command']!r}"


def test_commands_that_do_not_run_still_parse() -> None:
    for page in PAGES:
        for fence in fences_of(page):
            for command, _ in steps_of(fence) if fence.kind in ("sh", "console") else ():
                words = shlex.split(command.partition("|")[0], comments=True)
                if is_listed(command) and "minillm" in words and words[0] in ("minillm", "torchrun"):
                    command_parser().parse_args(words[words.index("minillm") + 1 :])


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_bytes()
    assert len(text) <= 9500
    assert text.count(b"\n") <= 190
