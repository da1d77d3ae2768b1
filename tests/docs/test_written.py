"""Pages that scripts write are up to date, docs/cli.md names every setting and variable, docs/kernels.md every op."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import write_help
import write_walk
from minillm import kernels
from minillm.kernels import reference
from minillm.kernels.decode_state import reference as state_reference
from minillm.user_config import UserConfig, read_config

ROOT = Path(__file__).resolve().parents[2]
CLI = write_help.PAGE.read_text(encoding="utf-8")


def test_the_help_of_every_command_is_up_to_date() -> None:
    assert write_help.page(CLI) == CLI, "run: python tests/write_help.py"


def test_the_walk_of_a_request_is_up_to_date(tiny_model: Path) -> None:
    text = write_walk.PAGE.read_text(encoding="utf-8")
    assert write_walk.page(text, tiny_model) == text, "run: python tests/write_walk.py"


def test_the_example_of_settings_has_every_kind_and_is_valid(tmp_path: Path) -> None:
    [example] = re.findall(r"^```toml\n(.*?)^```", CLI, re.M | re.S)
    (tmp_path / "config.toml").write_text(example, encoding="utf-8")
    assert read_config(str(tmp_path / "config.toml")).model == "smollm2-360m"
    assert set(tomllib.loads(example)) == {each.name for each in fields(UserConfig)}


def test_every_variable_of_ours_is_in_the_table() -> None:
    files = [path for folder in ("minillm", "kernels", "ui") for path in (ROOT / folder).rglob("*.py")]
    found = {name for path in files for name in re.findall("MINILLM_[A-Z_]+", path.read_text(encoding="utf-8"))}
    assert found == set(re.findall(r"MINILLM_[A-Z_]+", "".join(re.findall(r"^\| `.*$", CLI, re.M))))


def test_every_op_is_in_the_table() -> None:
    modules = {each.__name__ for each in (kernels, reference, state_reference)}
    ops = {name for name, each in vars(kernels).items() if inspect.isfunction(each) and each.__module__ in modules}
    first_column = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/kernels.md").read_text(encoding="utf-8"), re.M)
    assert {name for name in ops if not name.startswith("_")} <= set(re.findall(r"`(\w+)`", "".join(first_column)))
