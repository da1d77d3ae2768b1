"""Settings and text that the chat keeps from one start to the next."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from textual.drivers.headless_driver import HeadlessDriver

from lib.ui import FAKE, say, screen
from minillm.errors import MinillmError, UsageError
from minillm.params import MAX_TOKENS
from minillm.ui.app import ChatApp
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.preferences import Preferences, PreferencesFile, with_theme
from minillm.ui.settings import Settings, load_settings, with_param
from minillm.user_config import UserConfig, read_config


def preferences_file(folder: Path) -> PreferencesFile:
    return PreferencesFile(folder / "chat.json", folder / "config.toml")


@pytest.mark.anyio
async def test_changes_presets_and_the_theme_survive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")  # with fewer colors every theme is another
    (tmp_path / "config.toml").write_text('# mine\ntheme = "dark"  # at night\n\n[sampling]\ntop_k = 7\n')

    def settings() -> Settings:
        config = read_config(str(tmp_path / "config.toml"))
        flags = Settings("fake", sampling={"seed": 5})
        return load_settings(config, flags, preferences_file(tmp_path).read())

    def app() -> ChatApp:
        store = SessionStore(tmp_path / "conversations")
        return ChatApp(
            settings(), store, preferences_file=preferences_file(tmp_path), engine_command=FAKE,
            driver_class=HeadlessDriver,
        )  # fmt: skip

    async with app().run_test() as pilot:
        for line in ("/set temperature 0.3", "/preset save mine", "/theme nord", "/set n 2"):
            await say(pilot, line)
    assert settings().sampling["temperature"] == 0.3
    assert settings().sampling["top_k"] == 7
    assert settings().num_candidates == 2
    assert "seed" not in preferences_file(tmp_path).read().sampling, "a flag is for once"
    text = (tmp_path / "config.toml").read_text()
    assert text == '# mine\ntheme = "nord"  # at night\n\n[sampling]\ntop_k = 7\n'
    async with app().run_test() as pilot:
        assert pilot.app.theme == "nord"
        for line in ("/preset creative", "/beams 3"):
            await say(pilot, line)
    assert (settings().sampling["min_p"], settings().beams["beam_width"]) == (0.05, 3)
    async with app().run_test() as pilot:
        for line in ("/preset mine", "/preset delete mine", "/preset mine"):
            await say(pilot, line)
        assert screen(pilot).app.settings.sampling["temperature"] == 0.3
    assert settings().beams == {}
    assert preferences_file(tmp_path).read().presets == {}


@pytest.mark.anyio
async def test_thinking_survives_a_restart(tmp_path: Path) -> None:
    for word, before in (("off", None), ("on", False), ("", True)):
        settings = load_settings(UserConfig(), Settings("thinker"), preferences_file(tmp_path).read())
        assert settings.thinks is before
        app = ChatApp(
            settings, SessionStore(tmp_path / "conversations"), preferences_file=preferences_file(tmp_path),
            engine_command=FAKE, driver_class=HeadlessDriver,
        )  # fmt: skip
        async with app.run_test() as pilot:
            chat_screen = screen(pilot)
            while chat_screen.chat_pane.engine.phase != "ready":
                await pilot.pause(0.02)
            if word:
                await say(pilot, f"/think {word}")
                await say(pilot, "/set temperature 0.3")
    assert preferences_file(tmp_path).read() == Preferences(sampling={"temperature": 0.3}, thinks=True)


def test_what_was_set_back_to_a_default_stays_so() -> None:
    before = Settings("m", sampling={"temperature": 0.7, "top_k": 7})
    preferences = Preferences().changed(before, with_param(before, "top_k", "0"))
    assert load_settings(UserConfig(sampling={"top_k": 7}), Settings("m"), preferences).sampling["top_k"] == 0


@pytest.mark.parametrize(
    ("name", "value"), [("stop", "END"), ("stop", ["END"]), ("bad_words", ["x", [3]]), ("grammar", {"regex": "[a-z]+"})]
)
def test_a_parameter_of_the_configuration_is_not_taken_for_a_change(tmp_path: Path, name: str, value: Any) -> None:
    before = load_settings(UserConfig(sampling={name: value}), Settings("m"))
    after = with_param(before, "temperature", "0")
    assert after.sampling[name] == before.sampling[name]
    preferences = Preferences().changed(before, after).with_preset("mine", after.sampling)
    assert preferences.sampling == {"temperature": 0.0}
    preferences_file(tmp_path).write(preferences)
    assert preferences_file(tmp_path).read() == preferences


def test_no_limit_of_the_answer_is_a_number_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text('{"sampling": {"max_tokens": null}, "presets": {"mine": {"max_tokens": null}}}')
    preferences = preferences_file(tmp_path).read()
    assert preferences.sampling == preferences.presets["mine"] == {"max_tokens": MAX_TOKENS}


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    for text in (
        "{",
        '{"sampling": 3}',
        '{"thinks": "yes"}',
        '{"thinks": 1}',
        '{"sampling": {"heat": 1}}',
        '{"x": 1}',
        '{"beams": {"beam_width": "y"}}',
        '{"beams": {"beam_width": "3"}}',
        '{"beams": {"beam_width": 0}}',
        '{"beams": {"beam_width": Infinity}}',
    ):
        (tmp_path / "chat.json").write_text(text)
        with pytest.raises(UsageError, match=r"chat\.json: .*delete the file") as caught:
            preferences_file(tmp_path).read()
        assert "\n" not in str(caught.value)
    with pytest.raises(MinillmError, match="cannot be written"):
        PreferencesFile(tmp_path / "chat.json" / "no", tmp_path / "config.toml").write(Preferences())


@pytest.mark.parametrize(
    "text",
    [
        *("", "[sampling]\ntop_k = 1\n", 'model = "m"', "theme='light'\n", '[engine]\n\n[keymap]\nedit = "f12"\n'),
        'system = """\nRules:\n[1] Be brief.\n"""\n[engine]\n',
        "system = '''\ntheme = \"light\"\n'''\nmodel = \"m\"",
        'system = """\n[1] one\n"""\ntheme = "light"\n',
        'system = "one\u2028[two]"\n',
    ],
)
def test_the_theme_is_one_line_of_the_configuration(text: str) -> None:
    before = tomllib.loads(text)
    assert tomllib.loads(with_theme(text, "nord")) == {**before, "theme": "nord"}


@pytest.mark.parametrize("text", ['"theme" = "dark"\n', 'theme = """dark"""\n', "theme = ["])
def test_a_configuration_that_would_be_damaged_is_not_written(tmp_path: Path, text: str) -> None:
    file = preferences_file(tmp_path)
    file.config.write_text(text)
    with pytest.raises(MinillmError, match=r"config\.toml: .*; write the theme yourself"):
        file.write_theme("nord")
    assert file.config.read_text() == text


def test_names_of_presets_are_checked() -> None:
    for name, words in (("a b", "letters"), ("precise", "built in"), ("", "letters")):
        with pytest.raises(UsageError, match=words):
            Preferences().with_preset(name, {})
    with pytest.raises(UsageError, match="known: precise, balanced, creative"):
        Preferences().preset("nothing")


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o644])
def test_the_configuration_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "config.toml"
    path.write_text('theme = "dark"\n')
    path.chmod(mode)
    PreferencesFile(tmp_path / "chat.json", path).write_theme("nord")
    assert path.stat().st_mode & 0o7777 == mode
    PreferencesFile(tmp_path / "chat.json", tmp_path / "new.toml").write_theme("nord")
    assert (tmp_path / "new.toml").stat().st_mode & 0o7777 == 0o600
