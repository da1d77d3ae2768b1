"""Show Markdown that a model generates: without danger to the terminal, and cheaply while the text grows.

Cleaning the source is not enough, because the parser creates characters from entities (``&#x202e;``) and from
percent-encoded addresses. So every text in the parser's tokens is cleaned again. HTML is shown as it is written. Links
and images become text followed by their address, so no address is hidden, and nothing can be clicked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache
from typing import TypeGuard, cast

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from rich.cells import cell_len
from textual.app import ComposeResult, RenderResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.css.query import NoMatches
from textual.css.styles import RulesMap
from textual.dom import DOMNode
from textual.highlight import HighlightTheme, highlight
from textual.widget import AwaitMount, Widget
from textual.widgets import Label, Markdown, Static
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from minillm.text.safe import clean, clean_line
from minillm.ui.chat.markdown_rules import keep_as_written
from minillm.ui.drawing import settle, update_in_place
from minillm.ui.textual_internals import (
    Growing,
    MarkdownListItem,
    MarkdownParagraph,
    MarkdownTable,
    NotifiedOfText,
    UpdatesItself,
    parts_of,
    store_content,
    update_block,
)

_FIRST = "-first"  # the CSS class of a document's first block
_MOST_HIGHLIGHTED = 20_000  # longer code blocks (in characters) are not highlighted: each update highlights the whole


def harmless_parser() -> MarkdownIt:
    """Return a parser of CommonMark with tables and strikethrough.

    In the parser's output, nothing is hidden, clickable or harmful to the terminal.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    keep_as_written(parser)
    parser.core.ruler.push("harmless", _harmless)
    return parser


def _harmless(state: StateCore) -> None:
    columns: list[str] = []
    for token in state.tokens:
        if token.type == "table_open":
            columns = token.meta["columns"] = []
        elif token.type == "th_open":
            columns.append(str(token.attrs.get("style", "")).removeprefix("text-align:"))
        if token.type == "inline":
            token.children = list(_shown(token.children or []))
        elif token.type in ("fence", "code_block"):
            token.content = clean(token.content)
            token.info = clean_line((token.info.split() or [""])[0], 40)


def _shown(children: list[Token]) -> Iterator[Token]:
    target = ""
    automatic = False
    for token in children:
        if token.type == "link_open":
            target, automatic = _target(token, "href"), token.info == "auto"
        elif token.type == "link_close":
            if automatic:
                yield _code(target)
            else:
                yield from (_text(" "), _code(target))
            automatic = False
        elif automatic:
            continue  # skip the parser's decoded form; the address itself is shown
        elif token.type == "image":
            yield from (_text(f"[image: {clean(token.content)}] "), _code(_target(token, "src")))
        elif token.type == "softbreak":
            yield Token("hardbreak", "br", 0)  # models break lines on purpose
        else:
            token.content = clean(token.content)
            yield token


def plain_texts(text: str) -> list[str]:
    """Return the displayed texts of a document without Markdown syntax, by paragraph, table cell and code block."""
    texts = []
    for token in harmless_parser().parse(clean(text)):
        if token.type == "inline":
            texts.append("".join("\n" if each.type == "hardbreak" else each.content for each in token.children or []))
        elif token.type in ("fence", "code_block"):
            texts.append(token.content.rstrip())
    return texts


def _target(token: Token, attribute: str) -> str:
    return clean_line(str(token.attrs.get(attribute, "")), 300)


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)


def _code(content: str) -> Token:
    return Token("code_inline", "code", 0, content=content)


@lru_cache(maxsize=256)
def _known_language(name: str) -> str:
    """Return ``name`` if it is the name of a lexer, else "text". Textual would try all lexers for an unknown name."""
    try:
        get_lexer_by_name(name)
    except ClassNotFound:
        return "text"
    return name


def is_placed(widget: DOMNode) -> TypeGuard[Widget]:
    """Return whether a node is a widget that has been laid out."""
    return isinstance(widget, Widget) and widget.content_size.width > 0


class Paragraph(Growing, MarkdownParagraph):
    """A paragraph that grows in place. It can reserve blank lines below its text, and show another text in them."""

    _below = ""

    def set_content(self, content: Content) -> None:
        store_content(self, content)
        self._below = ""
        update_in_place(self, content, self.parent.lines_ahead if isinstance(self.parent, ModelMarkdown) else 0)

    def show_below(self, text: str) -> int:
        """Show ``text`` in a reserved line below the paragraph until the paragraph grows.

        Return the number of reserved lines. If it is 0, the text is not shown.
        """
        reserved, ahead = self.styles.min_height, 0
        # A new paragraph has no width yet. It will be about the width of its container.
        width = next((each.content_size.width for each in self.ancestors_with_self if is_placed(each)), 0)
        if reserved is not None and width:
            ahead = max(0, int(reserved.value) - self.visual.get_height(cast(RulesMap, self.styles), width))
        if ahead or self._below:
            self._below = text if ahead else ""
            self.refresh()
        return ahead

    def render(self) -> RenderResult:
        visual = super().render()
        if not self._below or not isinstance(visual, Content):
            return visual
        return Content.assemble(visual, "\n", (self._below, "$text-muted"))


class GrowingList(UpdatesItself, MarkdownBlock):
    """A list that grows at its end, without changes to earlier items.

    Textual would rebuild the whole list whenever text is added, because a list is one block, and the last block of a
    document is rebuilt.
    """

    async def become(self, block: MarkdownBlock) -> None:
        grown = False
        with suppress(NoMatches):  # the list's rows may not be mounted yet
            grown = isinstance(block, GrowingList) and await self._grow(block)
        if not grown:
            await self._replace(block)

    @property
    def items(self) -> list[MarkdownListItem]:
        return [block for block in parts_of(self) if isinstance(block, MarkdownListItem)]

    def compose(self) -> ComposeResult:
        yield from (_row(symbol, item) for symbol, item in zip(self._symbols(), self.items, strict=True))
        parts_of(self).clear()

    async def _grow(self, block: GrowingList) -> bool:
        """Change this list into ``block``, which is the same list with more text at its end.

        If the lists differ elsewhere, change nothing and return False.
        """
        rows, symbols = [row for row in self.children if isinstance(row, Horizontal)], block._symbols()
        if not 0 < len(rows) <= len(symbols) or [row.query_one(Bullet).symbol for row in rows] != symbols[: len(rows)]:
            return False
        item, parts = rows[-1].query_one(Vertical), parts_of(block.items[len(rows) - 1])
        before = list(item.children)
        if [type(part) for part in before] != [type(part) for part in parts[: len(before)]]:
            return False
        if before:
            if not isinstance(before[-1], (Paragraph, Fence, GrowingList)):
                return False
            await update_block(before[-1], parts[len(before) - 1])
        await item.mount_all(parts[len(before) :])
        await self.mount_all(
            _row(symbol, item) for symbol, item in zip(symbols[len(rows) :], block.items[len(rows) :], strict=True)
        )
        return True

    async def _replace(self, block: MarkdownBlock) -> None:
        parent = self.parent
        assert isinstance(parent, Widget)
        if self.has_class(_FIRST):
            block.add_class(_FIRST, update=False)
        await parent.mount(block, after=self)
        await self.remove()

    def _symbols(self) -> list[str]:
        """Return the markers of the items: bullets, or numbers that count from the first item's number."""
        bullets = [item.bullet for item in self.items]
        if not bullets[0].isdecimal():
            return bullets
        words = [f"{number}. " for number in range(int(bullets[0]), int(bullets[0]) + len(bullets))]
        return [word.rjust(len(words[-1]) + 1) for word in words]


class Bullet(Static):
    def __init__(self, symbol: str) -> None:
        super().__init__(Content(symbol))
        self.symbol = symbol


def _row(symbol: str, item: MarkdownListItem) -> Horizontal:
    return Horizontal(Bullet(symbol), Vertical(*parts_of(item)))


class Fence(MarkdownFence):
    """A code block that grows in place. Its text is only highlighted if a language is given."""

    def set_content(self, content: Content) -> None:
        store_content(self, content)
        with suppress(NoMatches):
            label = self.query_one("#code-content", Label)
            if max(map(cell_len, content.plain.split("\n"))) <= label.content_size.width:
                update_in_place(label, content)
            else:
                label.update(content)  # code lines are not wrapped: they scroll sideways

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        if len(code) > _MOST_HIGHLIGHTED:
            return Content(code)
        return highlight(code, language=_known_language(language) if language else "text", theme=_legible_code())


@cache
def _legible_code() -> type[HighlightTheme]:
    """Return Textual's theme for code without faded colors."""
    faded = re.compile(r"\$text \d+%| \d+%")
    styles = {
        token: faded.sub(lambda found: "$dim" if "text" in found[0] else "", style)
        for token, style in HighlightTheme.STYLES.items()
    }
    return type("LegibleCode", (HighlightTheme,), {"STYLES": styles})


class Table(NotifiedOfText, MarkdownTable):
    """A table. The second line of its source sets the alignment of the columns."""

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self._columns: list[str] = token.meta["columns"]

    def on_mount(self) -> None:
        for number, cell in enumerate(self.query(".header, .cell")):
            cell.set_styles(f"text-align: {self._columns[number % len(self._columns)] or 'left'};")

    def text_changed(self, block: MarkdownBlock) -> None:
        if isinstance(block, Table) and self.is_attached:
            self._columns = block._columns
            self.on_mount()


class ModelMarkdown(Growing, Markdown):
    """Shows Markdown that grows by `append_text`."""

    BLANK = True  # see `TurnView`

    BLOCKS = {  # noqa: RUF012
        **Markdown.BLOCKS,
        "paragraph_open": Paragraph,
        "bullet_list_open": GrowingList,
        "ordered_list_open": GrowingList,
        "fence": Fence,
        "code_block": Fence,
        "table_open": Table,
    }

    def __init__(self, text: str = "") -> None:
        super().__init__(clean(text), parser_factory=harmless_parser, open_links=False)
        self.lines_ahead = 0

    async def append_text(self, text: str, lines_ahead: int = 0) -> None:
        """Add model output. Only the last block of the document is rebuilt.

        Args:
            lines_ahead: the number of blank lines that the last paragraph reserves when it grows. Most new lines then
                need no layout of the screen. `end` frees unused lines.
        """
        self.lines_ahead = lines_ahead
        before = self._last_block
        await self.append(clean(text))
        last = self._last_block
        if last is before:
            return
        self._settle(before)
        if lines_ahead and isinstance(last, Paragraph):
            last.styles.min_height = 1 + lines_ahead  # a new block needs a layout anyway

    def mount(
        self, *widgets: Widget, before: int | str | Widget | None = None, after: int | str | Widget | None = None
    ) -> AwaitMount:
        """Mount widgets, as in Textual, and mark the first block of the document, which has no space above it.

        ``:first-child`` and ``:last-child`` could select this block without a mark. But if a rule uses one of them,
        Textual restyles all blocks whenever a block is added.
        """
        if widgets and not self.children:
            widgets[0].add_class(_FIRST, update=False)
        return super().mount(*widgets, before=before, after=after)

    def show_below(self, text: str) -> int:
        """Show ``text`` in a blank line that the last paragraph has reserved below its own text.

        Return the number of reserved lines. If it is 0, the text is not shown.
        """
        last = self._last_block
        return last.show_below(text) if isinstance(last, Paragraph) else 0

    def end(self) -> None:
        self._settle(self._last_block)

    def _settle(self, block: Widget | None) -> None:
        if isinstance(block, Paragraph):
            block.show_below("")
        if block is not None:
            settle(block)

    @property
    def _last_block(self) -> Widget | None:
        return self.children[-1] if self.children else None
