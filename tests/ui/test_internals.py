"""The private names of Textual are used in one file."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import textual
from textual.message_pump import MessagePump

from minillm import ui
from minillm.ui import textual_internals

FILES = sorted(Path(ui.__file__).parent.rglob("*.py"))
INTERNALS = Path(textual_internals.__file__)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    assert INTERNALS in FILES
    for path in FILES:
        if path != INTERNALS:
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_no_private_module_of_textual_is_imported() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("textual"):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(map(is_private, names)), f"{path}:{node.lineno}"


def test_every_private_name_that_is_used_is_our_own() -> None:
    defined, used = set(), {}
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined.add(node.target.id)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    defined.add(node.attr)
                used[node.attr] = f"{path.name}:{node.lineno}"
    used.pop("_exit")  # of `os`
    assert {name: place for name, place in used.items() if name not in defined} == {}


def test_no_private_name_of_textual_is_taken() -> None:
    """A method of ours by the name of one of Textual's would be called in its place."""
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(ui.__path__, "minillm.ui.")]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    ours = [each for each in classes if each.__module__.startswith("minillm.ui") and issubclass(each, MessagePump)]
    assert len(ours) > 30
    for each in ours:
        if each.__module__ != textual_internals.__name__:
            bases = [base for base in each.__mro__ if base.__module__.startswith("textual")]
            theirs = {name for base in bases for name in vars(base)}
            functions = {
                name for name, value in vars(each).items() if getattr(value, "__module__", "") == each.__module__
            }
            taken = set(filter(is_private, functions & theirs))
            assert not taken, (each, taken)


def test_the_version_that_it_was_tested_with_is_named() -> None:
    assert textual_internals.__doc__ is not None
    assert f"Textual {textual.__version__.split('.')[0]}." in textual_internals.__doc__
