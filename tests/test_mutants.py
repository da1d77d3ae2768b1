"""The table of seeded faults fits the code: each old text is there once, and each test is there."""

from __future__ import annotations

from faults import FAULTS
from mutants import problems


def test_each_fault_can_still_be_made() -> None:
    assert [line for fault in FAULTS for line in problems(fault)] == []


def test_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 65
