"""Leave out work of Textual that no test observes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import RenderableType


@contextmanager
def quick() -> Iterator[None]:
    """Patch Textual while the context is open, if tests of the chat run."""
    if "textual.app" not in sys.modules:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        _parse_once(patch)
        _join_no_lines(patch)
        yield


def _parse_once(patch: pytest.MonkeyPatch) -> None:
    """Parse each style sheet once for all apps. The result depends only on its text and the theme's colors."""
    from textual.css.stylesheet import Stylesheet

    parse, parsed = Stylesheet._parse_rules, dict[Any, Any]()

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = tuple(self._variables.items()), args, tuple(kwargs.items())
        if key not in parsed:
            parsed[key] = parse(self, *args, **kwargs)
        return parsed[key]

    patch.setattr(Stylesheet, "_parse_rules", once)


def _join_no_lines(patch: pytest.MonkeyPatch) -> None:
    """Draw all changed widgets, and do not join them to lines. Without a terminal nobody reads those."""
    from textual._compositor import Compositor
    from textual.geometry import Region

    def full(self: Compositor, simplify: bool = False) -> RenderableType | None:
        if simplify:
            return whole(self, simplify)
        self._dirty_regions.clear()
        for _ in self._get_renders(self.size.region):
            pass
        return None

    def partial(self: Compositor) -> None:
        regions = self._dirty_regions.copy()
        self._dirty_regions.clear()
        if regions:
            for _ in self._get_renders(Region.from_union(regions).intersection(self.size.region)):
                pass

    whole = Compositor.render_full_update
    patch.setattr(Compositor, "render_full_update", full)
    patch.setattr(Compositor, "render_partial_update", partial)
