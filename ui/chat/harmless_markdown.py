"""Markdown that a stranger wrote, made harmless between the parser and the widgets.

Cleaning the source is not enough: the parser itself makes characters, from entities (``&#x202e;``) and from
percent-encoded addresses, so every text is cleaned again in the tokens. HTML is shown, not interpreted. Links and
pictures become text with their target beside them: nothing is hidden behind a word, and nothing can be clicked.
"""

from __future__ import annotations

from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token

from minillm.text.safe import clean, clean_line


def harmless_parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough, and no way to hide or to obey anything."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.core.ruler.push("harmless", _harmless)
    return parser


def _harmless(state: StateCore) -> None:
    for token in state.tokens:
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
            continue  # the parser's decoded form of the address; the address itself is shown
        elif token.type == "image":
            yield from (_text(f"[image: {clean(token.content)}] "), _code(_target(token, "src")))
        elif token.type == "softbreak":
            yield Token("hardbreak", "br", 0)  # models break lines where they mean it
        else:
            token.content = clean(token.content)
            yield token


def _target(token: Token, attribute: str) -> str:
    return clean_line(str(token.attrs.get(attribute, "")), 300)


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)


def _code(content: str) -> Token:
    return Token("code_inline", "code", 0, content=content)
