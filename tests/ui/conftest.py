"""Fixtures of the tests of the chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from textual.css.stylesheet import Stylesheet


@pytest.fixture(scope="session", autouse=True)
def _styles_are_parsed_once_a_theme() -> Iterator[None]:
    """And not again in each app: what is parsed depends on the text and the theme's colours alone."""
    parse: Any = Stylesheet._parse_rules
    parsed: dict[Any, Any] = {}

    def once(self: Stylesheet, *args: Any, **kwargs: Any) -> Any:
        key = tuple(self._variables.items()), args, tuple(kwargs.items())
        if key not in parsed:
            parsed[key] = parse(self, *args, **kwargs)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", once)
        yield
