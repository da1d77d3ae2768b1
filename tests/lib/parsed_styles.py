"""Parse each Textual style sheet once for all apps. The result depends only on its text and the theme's colors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def parsed_once() -> Iterator[None]:
    """Patch Textual while the context is open, if tests of the chat run."""
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
