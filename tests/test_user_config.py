"""Test config.toml and MINILLM_MODEL: precedence, settings of a request, and errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from minillm.cli.serve import _keys as api_keys
from minillm.config import EngineConfig
from minillm.errors import MinillmError, UsageError
from minillm.ui.chat.files import with_files
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.preferences import PreferencesFile
from minillm.user_config import UserConfig, read_config
from minillm.weights.manifest import default_model


def written(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = ", "Invalid value"),
        (b"model = '\xff'", "utf-8"),
        ("a = " + "[" * 5000, "recursion|nested"),
        ("a = " + "9" * 5000, "digit"),
        ("modle = 'x'", "unknown setting 'modle'; did you mean model"),
        ("temprature = 1", r"unknown setting 'temprature'; did you mean temperature below \[sampling\]?"),
        ("temperature = 1", r"did you mean temperature below \[sampling\]?"),
        ("num_block = 1", r"did you mean num_blocks below \[engine\]?"),
        ("beam_width = 1", r"did you mean beam_width below \[beams\]?"),
        ("[sampling]\nnum_blocks = 3", r"below \[sampling\]; did you mean num_blocks below \[engine\]?"),
        ("[engine]\ntop_p = 1", r"below \[engine\]; did you mean top_p below \[sampling\]?"),
        ("zzzzzzzz = 1", "known: beams"),
        ("theme = 'blue'", "theme must be one of dark, light, nord.*, not 'blue'"),
        ("model = 3", "model must be a text, not 3"),
        ("sampling = 3", r"\[sampling\] must be a table"),
        ("[sampling]\ntemperature = -1", "temperature must be at least 0"),
        ("[sampling]\nbeam_width = 2", "unknown parameter 'beam_width'"),
        ("[beams]\nbeam_width = 'x'", "beam_width must be a whole number"),
        ("[engine]\nnum_block = 3", "did you mean num_blocks"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line_that_names_it(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=words) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 350 + len(str(path))


def test_only_the_users_own_file_may_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CONFIG", str(tmp_path))
    assert read_config() == UserConfig()
    written(tmp_path, "model = 'small'")
    assert read_config() == UserConfig("small")
    with pytest.raises(UsageError, match="there is no"):
        read_config(str(tmp_path / "none.toml"))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="not a regular file"):
            read_config(str(path))


def test_flag_then_environment_then_file_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_MODEL", "of-environment")
    assert UserConfig("of-file").choose_model("of-flag") == "of-flag"
    assert UserConfig("of-file").choose_model(None) == "of-environment"
    monkeypatch.setenv("MINILLM_MODEL", "")
    assert UserConfig("of-file").choose_model(None) == "of-file"
    assert UserConfig().choose_model(None) == default_model()


SAMPLING = UserConfig(sampling={"temperature": 0.5, "max_tokens": 7, "n": 2})
SEARCHING = UserConfig(sampling=SAMPLING.sampling, beams={"beam_width": 3})
MODEL = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        (UserConfig(), {"max_tokens": 3}, {**MODEL, "max_tokens": 3}),
        (SAMPLING, {}, {**MODEL, "temperature": 0.5, "max_tokens": 7, "n": 2}),
        (SAMPLING, {"temperature": 0.0}, {**MODEL, "temperature": 0.0, "max_tokens": 7, "n": 2}),
        (SAMPLING, {"beam_width": 2}, {"repetition_penalty": 1.1, "max_tokens": 7, "beam_width": 2}),
        (SAMPLING, {"length_penalty": 2.0}, {"repetition_penalty": 1.1, "max_tokens": 7, "beam_width": 4,
                                             "length_penalty": 2.0}),
        (SEARCHING, {}, {"repetition_penalty": 1.1, "max_tokens": 7, "beam_width": 3}),
        (SEARCHING, {"n": 1}, {"repetition_penalty": 1.1, "max_tokens": 7, "beam_width": 3, "n": 1}),
        (SEARCHING, {"temperature": 1.0}, {**MODEL, "temperature": 1.0, "max_tokens": 7, "n": 2}),
        (UserConfig(beams={"beam_width": 1}), {}, MODEL),
        (UserConfig(), {"temprature": 1}, {**MODEL, "temprature": 1}),
    ],
)  # fmt: skip
def test_what_is_given_goes_before_the_file_and_the_file_before_the_model(
    config: UserConfig, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert config.request_values(given, MODEL) == expected


def test_files_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    mark = "\ufeff"
    config = Path(written(tmp_path, f"{mark}theme = 'nord'\n"))
    assert read_config(str(config)).theme == "nord"
    PreferencesFile(tmp_path / "chat.json", config).write_theme("dark")
    assert read_config(str(config)).theme == "dark"
    (tmp_path / "keys").write_text(f"{mark}key-of-anna\n")
    assert api_keys("", str(tmp_path / "keys")) == {"key-of-anna": "key 1"}
    (tmp_path / "template").write_text(mark + "{{ messages }}")
    assert EngineConfig(chat_template=str(tmp_path / "template")).chat_template == "{{ messages }}"
    (tmp_path / "notes.txt").write_text(f"{mark}notes")
    assert with_files("@notes.txt", tmp_path) == "@notes.txt\n\n```notes.txt\nnotes\n```"


def test_errors_of_the_system_have_no_numbers(tmp_path: Path) -> None:
    file = PreferencesFile(tmp_path, tmp_path)
    for read in (file.read, lambda: file.write_theme("dark"), lambda: SessionStore(tmp_path).load(tmp_path)):
        with pytest.raises(MinillmError) as caught:
            read()
        assert "Errno" not in str(caught.value)
