"""Files and classes stay small enough to be read at once."""

from __future__ import annotations

import ast

import pytest

from lib.layers import PACKAGES, ROOT, sources
from size import first_chapter, main

_MOST_LINES, _MOST_METHODS, _MOST_ATTRIBUTES, _CHAPTER = 420, 25, 18, 2_150


def _texts() -> dict[str, str]:
    """Return the text of each source file, by its path."""
    return {str(path.relative_to(ROOT)): path.read_text() for package in PACKAGES for path in sources(package)}


def _set_in(function: ast.AST) -> set[str]:
    """Return the names of the attributes of ``self`` that a function sets."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def test_no_file_is_long() -> None:
    lengths = {path: len(text.splitlines()) for path, text in _texts().items()}
    assert len(lengths) > 300
    assert {path: length for path, length in lengths.items() if length > _MOST_LINES} == {}


def test_no_class_has_many_methods_or_attributes() -> None:
    large, count = [], 0
    for path, text in _texts().items():
        for cls in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            methods = [node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            attributes = set().union(*(_set_in(each) for each in methods if each.name == "__init__"))
            count += len(attributes)
            most = 18 if cls.name == "DeviceRunner" else _MOST_METHODS
            if len(methods) > most or len(attributes) > _MOST_ATTRIBUTES:
                large.append(f"{path}: {cls.name} has {len(methods)} methods and sets {len(attributes)} attributes")
    assert count > 500
    assert large == []


def test_the_first_chapter_stays_short() -> None:
    """Without blank lines. What one sampled request does not need belongs in files of other chapters."""
    assert 0 < len(first_chapter()) <= _CHAPTER


def test_make_size_counts_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    counts = {name: int(count.replace(",", "")) for count, name in rows}
    everything = sum(len(text.splitlines()) for text in _texts().values())
    assert counts["production, sum"] == everything
    assert sum(count for name, count in counts.items() if name.split("/")[0] in PACKAGES) == everything
    assert counts["tests, sum"] > counts["tests/lib"] > 0
