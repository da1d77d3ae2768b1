"""``--help`` shows the most used options, ``--help-all`` all of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from minillm.cli.main import command_parser, main
from minillm.cli.options import Parser


def parsers(parser: Parser, *words: str) -> Iterator[tuple[tuple[str, ...], Parser]]:
    """Yield the words of every command, with its parser."""
    yield words, parser.filled()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names = {id(child): name for name, child in reversed(action.choices.items())}  # aliases come later
            for child in {id(each): each for each in action.choices.values()}.values():
                yield from parsers(child, *words, names[id(child)])


COMMANDS = dict(parsers(command_parser()))


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_a_screen_and_help_all_has_every_option(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    brief, whole = shown(capsys, *words, "--help"), shown(capsys, *words, "--help-all")
    assert len(brief.splitlines()) <= 40
    assert max(map(len, (brief + whole).splitlines())) <= 80
    assert brief.startswith(" ".join(("usage: minillm", *words)))
    options = [each for each in COMMANDS[words]._actions if each.option_strings and each.help != argparse.SUPPRESS]
    for each in options:
        assert f"  {', '.join(each.option_strings)}" in whole
        assert each.help
    listed = [line for line in brief.splitlines() if line.startswith("  -")]
    assert len(listed) == len(COMMANDS[words].essential) + 2 if COMMANDS[words].essential else len(options)


def test_help_has_the_first_sentence_of_an_option_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  --speculate off|lookup|MODEL\n                            speculative decoding (default: off)\n" in shown(
        capsys, "serve", "-h"
    )
    whole = " ".join(shown(capsys, "serve", "--help-all").split())
    assert "--speculate off|lookup|MODEL speculative decoding. lookup: propose draft tokens by n-gram lookup" in whole
    assert "model and memory: -m, --model NAME" in whole


def test_the_width_follows_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, longest in (("200", 100), ("70", 68), ("10", 60), ("wide", 78)):
        monkeypatch.setenv("COLUMNS", columns)
        assert longest - 12 <= max(map(len, shown(capsys, "chat", "--help-all").splitlines())) <= longest


def test_prompts_may_follow_options() -> None:
    found = command_parser().parse_args(["generate", "a", "-t", "0", "b", "--chat", "c"])
    assert (found.prompts, found.temperature, found.chat) == (["a", "b", "c"], 0.0, True)


@pytest.mark.parametrize(
    ("arguments", "prompts"),
    [
        (["a", "-t", "0", "--", "-b", "--", "c"], ["a", "-b", "--", "c"]),
        (["a", "-t", "0", "-5"], ["a", "-5"]),
        (["a", "-t", "0", "- a list"], ["a", "- a list"]),
        (["-t", "0", "--", "-b"], ["-b"]),
    ],
)
def test_prompts_may_begin_with_a_dash(arguments: list[str], prompts: list[str]) -> None:
    found = command_parser().parse_args(["generate", *arguments])
    assert (found.prompts, found.temperature) == (prompts, 0)
