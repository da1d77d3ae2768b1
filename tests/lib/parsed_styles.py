"""Textual parses a style sheet once for all apps: what is parsed depends on its text and the theme's colors alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def parsed_once() -> Iterator[None]:
    """As long as it is open, where tests of the chat are among those that run."""
    stylesheet: Any = sys.modules.get("textual.css.stylesheet")
    if stylesheet is None:
        yield
        return
    parse, parsed = stylesheet.Stylesheet._parse_rules, dict[Any, Any]()

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = tuple(self._variables.items()), args, tuple(kwargs.items())
        if key not in parsed:
            parsed[key] = parse(self, *args, **kwargs)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stylesheet.Stylesheet, "_parse_rules", once)
        yield
