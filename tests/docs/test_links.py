"""Test that the Markdown pages name existing files, headings, tests and packages, and the right version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import minillm
from lib.layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "kernels", "minillm", "ui", "tests", "examples")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
FILES = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
FILES += [f"/{path.name}" for path in ROOT.iterdir()]


def prose(page: Path) -> str:
    """Return a page's text without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= {page.name for page in PAGES}
    assert len(PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = prose(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(linked), f"{target}: no such heading"
    for name in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|svg))`", text):
        assert any(file.endswith(f"/{name}") for file in FILES), f"`{name}` does not exist"
    for name in re.findall(r"`((?:kernels|minillm|ui|tests|docs)/[\w/.-]*)", text):
        assert (ROOT / name).exists(), f"`{name}` does not exist"
    for name in re.findall(r"`(?:[\w/.]+::)?(test_\w+)`", text):
        assert any(f"def {name}(" in path.read_text() for path in (ROOT / "tests").rglob("test_*.py")), name


def test_the_order_of_the_packages_is_the_tested_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"```text\n{LAYERS.strip()}\n```" in page


def test_the_changelog_begins_with_this_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[?(\d[\w.]*)", changes, re.M)
    assert newest is not None
    assert newest[1] == minillm.__version__
