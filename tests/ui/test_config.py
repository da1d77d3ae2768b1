"""The configuration file, the settings, and the table of slash commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding

from minillm.errors import UsageError
from minillm.ui.app import ChatApp
from minillm.ui.bars import VIEWS
from minillm.ui.chat.commands import COMMANDS
from minillm.ui.chat.slash import CommandTable
from minillm.ui.chat_screen import ChatScreen, bindings_by_name
from minillm.ui.help import KEYS
from minillm.ui.keymap import keys_of
from minillm.ui.settings import (
    CHAT_SAMPLING,
    Settings,
    field_texts,
    load_settings,
    settings_summary,
    with_param,
    with_texts,
)
from minillm.user_config import UserConfig, read_config
from minillm.weights.manifest import default_model

FILE = """
model = "small"
system = "be brief"
theme = "light"
[sampling]
temperature = 0.3
n = 2
[beams]
beam_width = 3
[engine]
num_blocks = 99
"""


def load(tmp_path: Path, text: str | None, **flags: object) -> Settings:
    path = tmp_path / "config.toml"
    if text is not None:
        path.write_text(text)
    config = UserConfig() if text is None else read_config(str(path))
    return load_settings(config, Settings(config.choose_model(None), sampling={}, **flags))  # type: ignore[arg-type]


def test_the_file_and_the_flags_over_it(tmp_path: Path) -> None:
    assert load(tmp_path, None) == Settings(default_model(), {"pool_tokens": 32768})
    settings = load(tmp_path, FILE)
    assert (settings.model, settings.system, settings.theme) == ("small", "be brief", "light")
    assert settings.sampling == {**CHAT_SAMPLING, "temperature": 0.3, "n": 2}
    assert settings.engine == {"num_blocks": 99}
    assert settings.num_candidates == 3
    flags = Settings("big", {"num_blocks": 7}, {"temperature": 1.0})
    over = load_settings(read_config(str(tmp_path / "config.toml")), flags)
    assert (over.model, over.engine, over.sampling["temperature"]) == ("big", {"num_blocks": 7}, 1.0)


def test_any_option_of_beam_search_turns_it_on(tmp_path: Path) -> None:
    flags = {"length_penalty": 2.0}
    assert load(tmp_path, None, beams=flags).num_candidates == 4, "as in `minillm run` and `generate`"
    assert load(tmp_path, FILE, beams=flags).request_params()["length_penalty"] == 2.0
    assert load(tmp_path, FILE, beams=flags).num_candidates == 3
    assert not load(tmp_path, "[beams]\nlength_penalty = 2.0").searches, "the file prepares a later search"


@pytest.mark.parametrize("option", [{"num_blocks": 7}, {"gpu_memory_utilization": 0.5}, {"pool_tokens": 99}])
def test_the_pool_is_a_few_contexts_unless_its_size_is_said(tmp_path: Path, option: dict[str, Any]) -> None:
    assert load(tmp_path, None, engine=option).engine == option
    little = {"pool_tokens": 32768}
    assert load(tmp_path, None, engine={"block_size": 8}).engine == {"block_size": 8, **little}
    assert load(tmp_path, None, engine={"weights": "int8"}).engine == {**little, "weights": "int8"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = ", "config.toml"),
        ("modle = 'x'", "did you mean model"),
        ("theme = 'blue'", "theme must be one of dark, light, nord"),
        ("model = 3", "model must be a text"),
        ("sampling = 3", r"\[sampling\] must be a table"),
        ("[sampling]\ntemperature = -1", "temperature"),
        ("[sampling]\ntemprature = 1", "temprature"),
        ("[beams]\nbeam_width = 'x'", "beam_width"),
        ("[engine]\nnum_block = 3", "did you mean num_blocks"),
        ("[engine]\nblock_size = 3", "block_size"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load(tmp_path, text)
    assert "config.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fields_round_trip() -> None:
    settings = Settings("m")
    texts = field_texts(settings)
    assert (texts["temperature"], texts["seed"], texts["n"], texts["beam_width"]) == ("0.7", "", "1", "1")
    assert with_texts(settings, texts) == settings
    changed = with_texts(settings, {**texts, "seed": "5", "stop": "END"})
    assert changed.sampling == {**CHAT_SAMPLING, "seed": 5, "stop": ("END",)}
    assert with_texts(changed, field_texts(changed)) == changed
    assert with_texts(Settings("m", sampling={"logprobs": 2}), texts).sampling["logprobs"] == 2, "it has no field"
    searching = with_texts(settings, {**texts, "beam_width": "3"})
    assert searching.beams == {"beam_width": 3, "length_penalty": 1.0}
    assert with_texts(searching, texts).beams == {}
    assert settings_summary(Settings("m", sampling={"temperature": 0.0, "seed": 3, "n": 2})) == "greedy · seed 3 · n 2"


@pytest.mark.parametrize(
    ("name", "text"),
    [("top_p", "2"), ("top_k", "1.5"), ("temperature", ""), ("max_tokens", "0"), ("min_p", "nan"), ("n", "0"),
     ("beam_width", "x"), ("length_penalty", "")],
)  # fmt: skip
def test_a_wrong_value_is_named(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        with_param(Settings("m"), name, text)


def test_other_parameters_keep_all_of_their_digits() -> None:
    sampling = {"temperature": 0.12345678, "top_p": 0.99999999, "frequency_penalty": 1e-7, "stop": ("1.0",)}
    settings = Settings("m", sampling=sampling, beams={"beam_width": 3, "length_penalty": 1.00000001})
    changed = with_param(settings, "top_k", "5")
    assert (changed.sampling, changed.beams) == ({**sampling, "top_k": 5}, settings.beams)


def test_one_parameter_by_its_name() -> None:
    settings = with_param(Settings("m"), "temperature", "0.25")
    assert settings.sampling["temperature"] == 0.25
    searching = with_param(settings, "beam_width", "4")
    assert searching.num_candidates == 4
    assert searching.request_params() == {
        "early_stopping": True, "max_tokens": 1024, "beam_width": 4, "length_penalty": 1.0
    }  # fmt: skip
    assert settings_summary(searching) == "4 beams"
    assert with_param(searching, "beam_width", "1").request_params()["temperature"] == 0.25
    with pytest.raises(UsageError, match="unknown parameter 'heat'"):
        with_param(settings, "heat", "1")


NAMES = (
    *("help", "new", "sessions", "delete"),
    *("find", "title", "compact", "export", "edit", "regenerate", "continue", "branch"),
    *("accept", "undo", "copy", "probabilities", "model", "reload", "sampling", "set", "preset", "think", "depths"),
    *("n", "beams", "system", "pool", "tables", "strands", "events", "memory", "steps", "theme", "tour"),
    *("editor", "suspend", "quit"),
)


def test_the_commands_and_their_keys() -> None:
    assert tuple(COMMANDS) == NAMES
    keys = {key: command.name for command in COMMANDS.values() for key in command.keys}
    assert keys == {
        "f1": "help", "f2": "model", "f3": "sampling", "f4": "system", "f5": "pool", "f6": "tables", "f7": "strands",
        "f8": "events", "f9": "memory", "f10": "steps", "ctrl+n": "new", "ctrl+o": "sessions", "ctrl+r": "reload",
        "ctrl+f": "find", "ctrl+t": "theme", "ctrl+q": "quit", "ctrl+z": "suspend", "alt+x": "editor",
        "alt+e": "edit", "alt+r": "regenerate",
        "alt+c": "continue", "alt+u": "undo", "alt+y": "copy", "alt+p": "probabilities",
        "alt+left": "branch", "alt+right": "branch",
    }  # fmt: skip
    bound = {
        binding.key: binding.action
        for bindings in (ChatScreen.BINDINGS, ChatApp.BINDINGS)
        for binding in bindings
        if isinstance(binding, Binding) and binding.action.startswith(("command(", "app."))
    }
    assert bound.pop("ctrl+q") == "app.leave", "asks before it quits"
    del keys["ctrl+q"]
    assert bound.keys() == keys.keys(), "each key is bound"
    assert all(bound[key].startswith(f"command('{name}', ") for key, name in keys.items())
    assert bound["alt+left"] == "command('branch', 'previous')"


def test_the_help_shows_the_keys_that_commands_declare() -> None:
    texts = [part for keys in KEYS.values() for line in keys.items() for part in line]
    shown = {name for names in re.findall(r"{([\w/-]+)}", " ".join(texts)) for name in names.split("/")}
    commands = {command.name for command in COMMANDS.values() if command.shown_key} - {"reload"}
    assert shown - keys_of(bindings_by_name()).keys() == commands - keys_of(bindings_by_name()).keys()
    assert commands <= shown


def test_the_tabs_and_the_commands_of_views_have_the_same_keys() -> None:
    assert [(view.name, view.key) for view in VIEWS] == [
        (COMMANDS[view.name].name, *COMMANDS[view.name].keys) for view in VIEWS
    ]


async def nothing(pane: object, argument: str) -> None:
    """Do nothing, as a command's action."""


def test_one_declaration_feeds_all() -> None:
    table = CommandTable()
    table.command("walk", "go there", argument="[WHERE]", keys={"ctrl+w": "", "alt+w": "home"}, label="Walk")(nothing)
    table.command("run", "faster", "ctrl+x", scope="app")(nothing)
    walk, run = table.values()
    assert (walk.usage, walk.needs_argument, walk.action) == ("/walk [WHERE]", False, nothing)
    assert (run.usage, run.shown_key, run.keys) == ("/run", "Ctrl+X", {"ctrl+x": ""})
    assert table.parse("/wa far away") == (walk, "far away")
    assert table.completions("/w") == [walk]
    first, second = table.bindings("chat")
    assert (first.key, first.action, first.description, first.show) == ("ctrl+w", "command('walk', '')", "Walk", True)
    assert (second.key, second.action) == ("alt+w", "command('walk', 'home')")
    assert [(each.key, each.show, each.priority) for each in table.bindings("app", "everywhere")] == [
        ("ctrl+x", False, False)
    ]


def test_commands_are_found_by_their_beginning() -> None:
    assert COMMANDS.parse("/set temperature 0.5")[0].name == "set"
    assert COMMANDS.parse("/set temperature 0.5")[1] == "temperature 0.5"
    assert COMMANDS.parse("/set\ttemperature\t0.5") == (COMMANDS["set"], "temperature\t0.5"), "a tab separates words"
    assert COMMANDS.parse("/regen")[0].name == "regenerate"
    assert COMMANDS.parse("/N 3")[0].name == "n", "a whole name is no beginning of others"
    for line, words in (("/se", "/sessions, /set"), ("/modle", "did you mean /model"), ("/", "/help"), ("/n", "needs")):
        with pytest.raises(UsageError, match=words):
            COMMANDS.parse(line)


def test_names_of_other_chats_are_known_where_no_command_begins_so() -> None:
    for line, name in (("/rename a b", "title"), ("/exit", "quit"), ("/clear", "new"), ("/save x.md", "export")):
        command, argument = COMMANDS.parse(line)
        assert (command.name, argument) == (name, line.partition(" ")[2])
        assert COMMANDS.completions(line[:4]) == [command]
    assert "export" not in [command.name for command in COMMANDS.completions("/s")]
    names = [name for command in COMMANDS.values() for name in (command.name, *command.also)]
    assert len(names) == len(set(names))


def test_completions_while_a_command_is_typed() -> None:
    assert [command.name for command in COMMANDS.completions("/ste")] == ["steps"]
    assert len(COMMANDS.completions("/")) == len([*COMMANDS])
    for line in ("", "hello /st", "/set x", "/st\n"):
        assert COMMANDS.completions(line) == []
