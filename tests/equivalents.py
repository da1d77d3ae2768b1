"""Changes that `mutate` may draw and that change nothing: by name, the code before and after, and the reason."""

from __future__ import annotations

EQUIVALENTS: dict[str, tuple[str, str, str]] = {}
