"""All that is known of one block, in words."""

from __future__ import annotations

from textual.content import Content

from minillm.service.messages import BlockFacts, TableView
from minillm.text.safe import clean, clean_line
from minillm.ui.memory.names import Names, table_name
from minillm.ui.memory.pool import Pool
from minillm.ui.numbers import duration, plural

_VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥"})


def block_facts(facts: BlockFacts, pool: Pool, names: Names) -> Content:
    """State, fill, owners, place in the prefix cache, age, and the tokens as text."""
    block = facts.block
    state, references = pool.state(block).name.lower(), plural(pool.ref_counts[block], "reference")
    lines = [
        Content.assemble((f"block {block}", "bold"), f" · {state} · {references}"),
        _fact("filled", f"{pool.filled[block]} of {plural(pool.block_size, 'slot')}"),
    ]
    if facts.age is not None:
        lines.append(_fact("age", duration(facts.age)))
    if holders := pool.holders(block):
        lines.append(_fact("owners", ", ".join(f"{table_name(table, names)} ({n})" for table, n in holders)))
    if facts.tokens:
        lines.append(Content.assemble(("tokens  ", "$foreground 60%"), token_text(facts.tokens)))
    if facts.node is not None:
        after = f" after {clean_line(facts.before, 40)}" if facts.before else ", a first one"
        lines.append(_fact("hash", f"node {facts.node}{after}"))
    return Content("\n").join(lines)


def host_block_facts(block: int, table: TableView, names: Names) -> Content:
    """What the app itself knows of a block in the host's memory."""
    return Content.assemble(
        (f"host block {block}", "bold"),
        " · swapped\n",
        _fact("owner", f"{table_name(table, names)} ({table.blocks.index(block)})\n"),
        _fact("waits", f"{plural(table.num_tokens, 'token')} in {plural(len(table.blocks), 'block')}"),
    )


def token_text(tokens: list[str]) -> Content:
    """Tokens one after another, with a thin rule where one ends; what cannot be seen has a sign."""
    return Content.assemble(*(part for token in tokens for part in (_shown(token), ("│", "$foreground 35%"))))


def _shown(token: str) -> str:
    return clean(token).translate(_VISIBLE)


def _fact(name: str, text: str) -> Content:
    return Content.assemble((f"{name:<8}", "$foreground 60%"), text)
