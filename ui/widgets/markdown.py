"""Streaming Markdown of a model: cleaned, without clickable links, cheap while it grows."""

from __future__ import annotations

from functools import lru_cache

from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from textual.content import Content
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownFence

from minillm.text import clean
from ui.markdown import harmless_parser

_MOST_HIGHLIGHTED = 20_000  # characters of one code block; more is shown plain, for it is highlighted at every update


@lru_cache(maxsize=256)
def _known_language(name: str) -> str:
    """``name``, or "text" where no lexer has it: Textual would guess by trying all of them."""
    try:
        get_lexer_by_name(name)
    except ClassNotFound:
        return "text"
    return name


class Fence(MarkdownFence):
    """A code block. One without a language is plain text."""

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        if len(code) > _MOST_HIGHLIGHTED:
            return Content(code)
        return super().highlight(code, _known_language(language) if language else "text", ansi, dark)


class ModelMarkdown(Markdown):
    """Markdown that grows by `append_text`."""

    BLOCKS = {**Markdown.BLOCKS, "fence": Fence, "code_block": Fence}  # noqa: RUF012

    def __init__(self, text: str = "") -> None:
        super().__init__(clean(text), parser_factory=harmless_parser, open_links=False)

    async def append_text(self, text: str) -> None:
        """Add what the model said; only the last block of the document is built anew."""
        await self.append(clean(text))
