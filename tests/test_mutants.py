"""Test that the table of seeded faults fits the code, and that random mutations are reproducible."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from equivalents import EQUIVALENTS
from faults import FAULTS
from mutants import problems
from mutations import FOLDERS, drawn, mutations
from places import changed
from reached import Reach, imports_of, module_of


def test_each_fault_can_still_be_made() -> None:
    assert [line for fault in FAULTS for line in problems(fault)] == []


def test_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 65


SOURCE = """
def first(a, *, b=1):
    'a docstring'
    if a < 2 and not b:
        raise ValueError(f"{a} is {-1}")
    self.c = a.get("key", [1, 2])
    return min(a, b) if a else True
"""
CHANGES = {
    ("comparison", "a < 2", "(a <= 2)"),
    ("and-or", "a < 2 and (not b)", "(a < 2 or not b)"),
    ("condition-negated", "a < 2 and (not b)", "(not (a < 2 and (not b)))"),
    ("condition-dropped", "a < 2 and (not b)", "(a < 2)"),
    ("sign-dropped", "not b", "(b)"),
    ("one-more", "2", "3"),
    ("one-less", "1", "0"),
    ("statement-dropped", "self.c = a.get('key', [1, 2])", "pass"),
    ("statement-dropped", "raise ValueError(f'{a} is {-1}')", "pass"),
    ("key", "a.get('key', [1, 2])", "(a.get('changed', [1, 2]))"),
    ("element-dropped", "[1, 2]", "([1])"),
    ("function", "min(a, b)", "(max(a, b))"),
    ("branches-swapped", "min(a, b) if a else True", "(True if a else min(a, b))"),
    ("boolean", "True", "False"),
    ("nothing-returned", "return min(a, b) if a else True", "return None"),
}


def test_each_operator_changes_what_it_is_for() -> None:
    found = list(mutations("a.py", SOURCE.encode()))
    assert {(each.operator, each.old, each.new) for each in found} >= CHANGES
    assert {each.function for each in found} == {"first"}
    assert not [each for each in found if "docstring" in each.old or each.old == "-1"]
    for each in found:
        changed = each.applied(SOURCE.encode()).decode()
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)), each


def test_edits_elsewhere_do_not_change_a_name() -> None:
    moved = "import os\n\ndef zero():\n    return 1 + 2\n" + SOURCE
    names = {(each.name, each.old, each.new) for each in mutations("a.py", SOURCE.encode())}
    assert names < {(each.name, each.old, each.new) for each in mutations("a.py", moved.encode())}


@pytest.mark.parametrize(
    ("function", "place", "new", "line"),
    [
        ("first", "If 0.test", "False", "    if (False):"),
        ("first", "Compare 0", "$left <= $comparators[0]", "    if (a <= 2) and not b:"),
        ("first", "Call 1.args[1].elts[0]", "$ + 1", '    self.c = a.get("key", [(1 + 1), 2])'),
        ("first", "Assign 0", "pass", "    pass"),
        ("first", "Return 0.value.body", "$func(($args[1], 0))", "    return (min((b, 0))) if a else True"),
        ("first", "and not b", "", "    if a < 2 :"),
        ("Second.é", "Return 0.value", "'é' + $", "        return ('é' + '→')"),
        ("", "Constant 0", "7", "ONE = (7)"),
    ],
)
def test_a_place_is_found_and_changed(function: str, place: str, new: str, line: str) -> None:
    source = f"ONE = 1\n{SOURCE}\n\nclass Second:\n    def é(self):\n        return '→'\n"
    lines = changed(source, function, place, new).splitlines()
    assert [each for each in lines if each not in source.splitlines()] == [line]


def test_a_place_that_is_gone_is_named() -> None:
    for function, place in (("third", "If 0"), ("first", "If 1"), ("first", "If 0.tests"), ("first", "a"), ("", "a b")):
        with pytest.raises(LookupError):
            changed(SOURCE, function, place, "pass")


def test_the_draw_is_stable_and_its_names_are_unique() -> None:
    chosen = drawn(200, 45)
    assert len({each.name for each in chosen}) == len(chosen) == 200
    assert chosen[:50] == drawn(50, 45) != drawn(50, 46)
    assert Counter(folder for each in chosen for folder in FOLDERS if each.file.startswith(folder)) == dict.fromkeys(
        FOLDERS, 50
    )


def test_equivalent_changes_have_reasons() -> None:
    names = {name.partition("::")[0] for name in EQUIVALENTS}
    assert [name for name in names if not (Path(__file__).parents[1] / name).is_file()] == []
    assert [name for name, (_, _, reason) in EQUIVALENTS.items() if len(reason) < 20] == []


def test_code_outside_of_functions_has_the_tests_that_import_it() -> None:
    test = "tests/test_mutants.py::test_names_are_unique"
    reach = Reach({test: 1.0})
    assert reach.of("minillm/checks.py", "") == []
    assert module_of("ui/chat/chat_pane.py") == "minillm.ui.chat.chat_pane"
    assert imports_of("tests/test_mutants.py") >= {"ast", "mutations", "mutations.drawn"}
    assert imports_of("tests/nowhere.py") == set()


@pytest.mark.parametrize(
    ("function", "tests"), [("f", ["quick", "slow"]), ("", ["quick", "slow", "slower"]), ("g", [])]
)
def test_the_fastest_tests_come_first(function: str, tests: list[str]) -> None:
    reach = Reach({"slow": 3.0, "quick": 1.0, "slower": 5.0})
    reach.tests |= {("a.py", "f"): {"slow", "quick", "failed"}, ("a.py", "h"): {"slower"}, ("b.py", "g"): {"quick"}}
    assert reach.of("a.py", function) == tests
