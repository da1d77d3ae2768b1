"""Places in Python code, named so that edits elsewhere do not change their names, and changes made there.

A place is in a function, named as in `mutations`: with its classes, without the functions in it; ``""`` is the rest of
the file. ``If 2`` is the third ``if`` of the function; ``If 2.test`` is its condition; ``Call 0.args[1]`` is the second
argument of the first call. The words and the order are those of Python's `ast`. Where a change has no such place, it is
named by a short text that occurs once in the function.

New code may quote the old: ``$`` is all of the place, ``$test`` or ``$args[1]`` a part of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import accumulate

_PLACE = re.compile(r"([A-Z]\w+) (\d+)((?:\.\w+(?:\[\d+\])?)*)")
_QUOTED = re.compile(r"\$((?:\w+(?:\[\d+\])?)(?:\.\w+(?:\[\d+\])?)*)?")
_WHOLE = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.Slice, ast.stmt)  # need no parentheses
_PART = re.compile(r"(\w+)(?:\[(\d+)\])?")


def changed(source: str, function: str, place: str, new: str) -> str:
    """Return the source with new code at a place.

    Raises:
        LookupError: there is no such function or place, or its text is there more than once.
    """
    tree = _tree(source)
    begin, end = span(source, _body(tree, function)) if function else (0, len(source))
    found = _PLACE.fullmatch(place)
    if found is None:
        count = source.count(place, begin, end)
        if count != 1:
            raise LookupError(f"{place!r} is {count} times in {function or 'the file'}, not once")
        at = source.index(place, begin)
        return source[:at] + new + source[at + len(place) :]
    kind, number, path = found.groups()
    nodes = [node for node in nodes_of(tree, function) if type(node).__name__ == kind]
    if int(number) >= len(nodes):
        raise LookupError(f"{function or 'the file'} has only {len(nodes)} of {kind}")
    node = _part(nodes[int(number)], path[1:])
    begin, end = span(source, node)
    text = _QUOTED.sub(lambda quoted: _text(source, _part(node, quoted[1] or "")), new)
    if isinstance(node, ast.expr) and not isinstance(node, ast.Slice | ast.Starred):
        text = f"({text})"
    return source[:begin] + text + source[end:]


def nodes_of(tree: ast.Module, function: str) -> Iterator[ast.AST]:
    """Yield the nodes in a function in the order of the text; for ``""`` those outside of functions."""
    if function:
        root = _body(tree, function)
        yield from (node for child in ast.iter_child_nodes(root) for node in _walk(child))
    else:
        yield from _outside(tree)


def functions_of(tree: ast.AST, before: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the names and nodes of the functions that are in no other function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield before + node.name, node
        else:
            yield from functions_of(node, f"{before}{node.name}." if isinstance(node, ast.ClassDef) else before)


def span(source: str, node: ast.AST) -> tuple[int, int]:
    """Return where a node begins and ends in the source, in characters; decorators are left out."""
    assert isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword)
    lines, starts = _lines(source)

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)


def lines_of(source: str, function: str) -> tuple[int, int]:
    """Return where the lines of a function begin and end in the source, in characters; for ``""`` those of the file."""
    if not function:
        return 0, len(source)
    begin, end = span(source, _body(_tree(source), function))
    return source.rfind("\n", 0, begin) + 1, end


_tree = lru_cache(8)(ast.parse)  # faults of one file follow one another


@cache
def _lines(source: str) -> tuple[list[str], list[int]]:
    """Return the lines of the source, and where each begins."""
    lines = source.split("\n")
    return lines, [0, *accumulate(len(line) + 1 for line in lines)]


def _body(tree: ast.Module, function: str) -> ast.AST:
    nodes = [node for name, node in functions_of(tree) if name == function]
    if not nodes:
        raise LookupError(f"there is no function {function}")
    return nodes[0]


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def _outside(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _outside(child)


def _part(node: ast.AST, path: str) -> ast.AST:
    for step in path.split(".") if path else ():
        name, index = _PART.fullmatch(step).groups()  # type: ignore[union-attr]
        value = getattr(node, name, None)
        if isinstance(value, list) and index is not None:
            value = value[int(index)] if int(index) < len(value) else None
        if not isinstance(value, ast.AST):
            raise LookupError(f"{type(node).__name__} has no {step}")
        node = value
    return node


def _text(source: str, node: ast.AST) -> str:
    begin, end = span(source, node)
    is_whole = isinstance(
        node, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript | ast.stmt | ast.Slice
    )
    return source[begin:end] if is_whole else f"({source[begin:end]})"
