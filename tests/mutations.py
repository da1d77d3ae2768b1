"""Small changes to Python code, by operators on its syntax tree, and a stable draw among them.

A change has a name: its file, function, operator, and its number among those of the operator in the function. The draw
goes by a hash of the name, so edits elsewhere do not change it.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("minillm/server", "minillm/service", "minillm/grammar", "ui/chat")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        file: relative to the project.
        function: the qualified name of the outermost function around it; empty outside of functions.
        operator: what kind of change it is.
        number: among the changes of this operator in the function.
        line: of the source.
        span: of the source, in bytes.
        old: the code as it is, in one line, and ``new``, as it becomes.
    """

    file: str
    function: str
    operator: str
    number: int
    line: int
    span: tuple[int, int]
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}::{self.function or '<module>'}::{self.operator}::{self.number}"

    def applied(self, source: bytes) -> bytes:
        """Return the source with the change."""
        begin, end = self.span
        return source[:begin] + self.new.encode() + source[end:]

    def is_python(self, source: bytes) -> bool:
        """Return whether the source with the change can be read."""
        try:
            ast.parse(self.applied(source))
        except SyntaxError:
            return False
        return True


def drawn(amount: int, seed: int) -> list[Mutation]:
    """Return changes drawn in turn from each folder, the same for a seed while the code is the same."""
    turns = zip_longest(*(_shuffled(folder, seed) for folder in FOLDERS))
    return list(islice((each for turn in turns for each in turn if each is not None), amount))


def _shuffled(folder: str, seed: int) -> Iterator[Mutation]:
    """Yield the valid changes to a folder, in the order of a hash of their names."""
    found = sorted(_all(folder), key=lambda each: hashlib.sha256(f"{seed} {each.name}".encode()).digest())
    return (each for each in found if each.is_python((ROOT / each.file).read_bytes()))


@cache
def _all(folder: str) -> list[Mutation]:
    files = sorted((ROOT / folder).rglob("*.py"))
    return [each for path in files for each in mutations(path.relative_to(ROOT).as_posix(), path.read_bytes())]


def mutations(file: str, source: bytes) -> Iterator[Mutation]:
    """Yield all changes to a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    numbers: Counter[tuple[str, str]] = Counter()
    tree = ast.parse(source)
    tests = {id(each.test) for each in ast.walk(tree) if isinstance(each, ast.If | ast.While | ast.IfExp)}
    for node, function in _nodes(tree, ""):
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)
        old = ast.unparse(node)
        for operator, changed in _changes(node, is_test=id(node) in tests):
            new = changed if isinstance(changed, str) else ast.unparse(changed)
            number = numbers[function, operator]
            numbers[function, operator] += 1
            if new == old:  # twice nothing
                continue
            if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
                new = f"({new})"
            yield Mutation(file, function, operator, number, node.lineno, span, old, new)


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the expressions and statements that may be changed, with the outermost function around each."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "format_spec", "conversion"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_beyond_tests(child):
                continue
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and "()" not in function:
                inner = f"{function}.{child.name}".lstrip(".")
                inner += "" if isinstance(child, ast.ClassDef) else "()"
            if isinstance(child, ast.expr | ast.stmt):
                yield child, inner.removesuffix("()") if "()" in inner else ""
            yield from _nodes(child, inner)


def _is_beyond_tests(node: ast.AST) -> bool:
    """Return whether code only explains itself: docstrings, messages of errors, f-strings, imports for types."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert)


def _changes(node: ast.AST, *, is_test: bool) -> Iterator[tuple[str, ast.AST | str]]:
    """Yield the changes of a node by itself: the operator, and the new node or text."""
    if is_test and isinstance(node, ast.expr) and not isinstance(node, ast.Compare):
        yield "condition-negated", ast.UnaryOp(ast.Not(), node)
    if isinstance(node, ast.Compare):
        for index, each in enumerate(node.ops):
            yield (
                "comparison",
                _with(node, "ops", [*node.ops[:index], _COMPARISONS[type(each)](), *node.ops[index + 1 :]]),
            )
    elif isinstance(node, ast.BoolOp):
        yield "and-or", _with(node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or())
        for index in range(len(node.values)):
            values = [*node.values[:index], *node.values[index + 1 :]]
            yield "condition-dropped", _with(node, "values", values) if len(values) > 1 else values[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "sign-dropped", node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        yield "arithmetic", _with(node, "op", _ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node.value)
    elif isinstance(node, ast.IfExp):
        yield "branches-swapped", ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.List | ast.Tuple | ast.Set) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        if len(node.elts) > 1:
            yield "element-dropped", _with(node, "elts", node.elts[:-1])
    elif isinstance(node, ast.Dict) and len(node.keys) > 1:
        changed = _with(node, "keys", node.keys[:-1])
        yield "element-dropped", _with(changed, "values", node.values[:-1])
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Subscript) and _is_key(node.slice):
        yield "key", _with(node, "slice", ast.Constant("changed"))
    elif isinstance(node, ast.stmt):
        yield from _of_statement(node)


def _of_constant(value: object) -> Iterator[tuple[str, ast.AST | str]]:
    if isinstance(value, bool):
        yield "boolean", repr(not value)
    elif isinstance(value, int):
        yield "one-more", repr(value + 1)
        yield "one-less", f"({value - 1})" if value < 1 else repr(value - 1)
    elif isinstance(value, float):
        yield "twice", repr(value * 2)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST | str]]:
    if isinstance(node.func, ast.Name) and node.func.id in _OPPOSITES:
        yield "function", _with(node, "func", ast.Name(_OPPOSITES[node.func.id]))
    if (
        isinstance(node.func, ast.Attribute)
        and node.func.attr in ("get", "pop")
        and node.args
        and _is_key(node.args[0])
    ):
        yield "key", _with(node, "args", [ast.Constant("changed"), *node.args[1:]])
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield "keyword-dropped", _with(node, "keywords", [*node.keywords[:index], *node.keywords[index + 1 :]])


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST | str]]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    stores = isinstance(node, ast.Assign) and not any(isinstance(each, ast.Name) for each in node.targets)
    if is_call or stores or isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Break | ast.Continue):
        yield "statement-dropped", "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not _is_false(node.value):
        yield "nothing-returned", "return None"


def _with(node: ast.AST, field: str, value: object) -> ast.AST:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return changed


def _is_key(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(each, ast.JoinedStr) or _is_key(each) for each in (node.left, node.right))
