"""All that is known of one block, in words."""

from __future__ import annotations

from textual.content import Content

from minillm.service.messages import TableView
from minillm.text.safe import clean, clean_line
from minillm.ui.memory.memory import Memory
from minillm.ui.numbers import duration, plural

_VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥"})


def block_facts(memory: Memory) -> Content:
    """The block that the reader is at: state, fill, owners, place in the prefix cache, age, and its tokens as text."""
    block, pool, facts = memory.block, memory.pool, memory.facts
    if block is None or pool is None:
        return Content("")
    if memory.on_host is not None:
        return _host_block_facts(block, memory.on_host, memory)
    if facts is None or facts.block != block:
        return Content(f"block {block} …")
    state, references = pool.state(block).name.lower(), plural(pool.ref_counts[block], "reference")
    lines = [
        Content.assemble((f"block {block}", "bold"), f" · {state} · {references}"),
        _fact("filled", f"{pool.filled[block]} of {plural(pool.block_size, 'slot')}"),
    ]
    if facts.age is not None:
        lines.append(_fact("age", duration(facts.age)))
    if holders := pool.holders(block):
        lines.append(_fact("owners", ", ".join(f"{memory.table_name(table)} ({n})" for table, n in holders)))
    if facts.tokens:
        lines.append(Content.assemble(("tokens  ", "$foreground 60%"), token_text(facts.tokens)))
    if facts.node is not None:
        after = f" after {clean_line(facts.before, 40)}" if facts.before else ", a first one"
        lines.append(_fact("hash", f"node {facts.node}{after}"))
    return Content("\n").join(lines)


def _host_block_facts(block: int, table: TableView, memory: Memory) -> Content:
    return Content.assemble(
        (f"host block {block}", "bold"),
        " · swapped\n",
        _fact("owner", f"{memory.table_name(table)} ({table.blocks.index(block)})\n"),
        _fact("waits", f"{plural(table.num_tokens, 'token')} in {plural(len(table.blocks), 'block')}"),
    )


def token_text(tokens: list[str]) -> Content:
    """Tokens one after another, with a thin rule where one ends; invisible characters have a sign."""
    return Content.assemble(*(part for token in tokens for part in (_shown(token), ("│", "$foreground 35%"))))


def _shown(token: str) -> str:
    return clean(token).translate(_VISIBLE)


def _fact(name: str, text: str) -> Content:
    return Content.assemble((f"{name:<8}", "$foreground 60%"), text)
