"""The configuration file, the settings, and the table of slash commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm.errors import UsageError
from minillm.ui.chat.screen import ChatScreen
from minillm.ui.chat.slash import COMMANDS, completions, parse
from minillm.ui.config import load_settings
from minillm.ui.settings import (
    CHAT_SAMPLING,
    Settings,
    field_texts,
    read_beams,
    read_sampling,
    settings_summary,
    with_param,
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
    assert load(tmp_path, None) == Settings(default_model())
    settings = load(tmp_path, FILE)
    assert (settings.model, settings.system, settings.theme) == ("small", "be brief", "light")
    assert settings.sampling == {**CHAT_SAMPLING, "temperature": 0.3, "n": 2}
    assert settings.engine == {"num_blocks": 99}
    assert settings.num_candidates == 3
    flags = Settings("big", {"num_blocks": 7}, {"temperature": 1.0})
    over = load_settings(read_config(str(tmp_path / "config.toml")), flags)
    assert (over.model, over.engine, over.sampling["temperature"]) == ("big", {"num_blocks": 7}, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = ", "config.toml"),
        ("modle = 'x'", "did you mean model"),
        ("theme = 'blue'", "theme must be dark or light"),
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
    assert read_sampling(texts, CHAT_SAMPLING) == dict(CHAT_SAMPLING)
    assert read_beams(texts, {}) == {}
    assert read_sampling({**texts, "seed": "5", "stop": "END"}, CHAT_SAMPLING)["seed"] == 5
    assert settings_summary(Settings("m", sampling={"temperature": 0.0, "seed": 3, "n": 2})) == "greedy · seed 3 · n 2"


@pytest.mark.parametrize(
    ("name", "text"),
    [("top_p", "2"), ("top_k", "1.5"), ("temperature", ""), ("max_tokens", "0"), ("min_p", "nan"), ("n", "0"),
     ("beam_width", "x"), ("length_penalty", "")],
)  # fmt: skip
def test_a_wrong_value_is_named(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        with_param(Settings("m"), name, text)


def test_one_parameter_by_its_name() -> None:
    settings = with_param(Settings("m"), "temperature", "0.25")
    assert settings.sampling["temperature"] == 0.25
    searching = with_param(settings, "beam_width", "4")
    assert searching.num_candidates == 4
    assert searching.request_params() == {"max_tokens": 1024, "beam_width": 4, "length_penalty": 1.0}
    assert settings_summary(searching) == "4 beams"
    assert with_param(searching, "beam_width", "1").request_params()["temperature"] == 0.25
    with pytest.raises(UsageError, match="unknown parameter 'heat'"):
        with_param(settings, "heat", "1")


def test_every_command_has_its_method_and_its_own_name() -> None:
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)
    for command in COMMANDS:
        assert callable(getattr(ChatScreen, command.action)), command


def test_commands_are_found_by_their_beginning() -> None:
    assert parse("/set temperature 0.5")[0].name == "set"
    assert parse("/set temperature 0.5")[1] == "temperature 0.5"
    assert parse("/regen")[0].name == "regenerate"
    assert parse("/N 3")[0].name == "n", "a whole name is no beginning of others"
    for line, words in (("/se", "/sessions, /set"), ("/modle", "did you mean /model"), ("/", "/help"), ("/n", "needs")):
        with pytest.raises(UsageError, match=words):
            parse(line)


def test_completions_while_a_command_is_typed() -> None:
    assert [command.name for command in completions("/ste")] == ["steps"]
    assert len(completions("/")) == len(COMMANDS)
    for line in ("", "hello /st", "/set x", "/st\n"):
        assert completions(line) == []
