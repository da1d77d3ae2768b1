"""All that is known of one block, in words."""

from __future__ import annotations

from textual.content import Content

from minillm.service.messages import BlockFacts, TableView
from minillm.text.safe import clean, clean_line
from minillm.ui.memory.names import Names, table_name
from minillm.ui.numbers import duration, plural

_VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥"})


def block_facts(facts: BlockFacts, block_size: int, names: Names) -> Content:
    """State, fill, owners, place in the prefix cache, age, and the tokens as text."""
    lines = [
        Content.assemble(
            (f"block {facts.block}", "bold"),
            f" · {facts.kind} · {plural(facts.ref_count, 'reference')}",
        ),
        _fact("filled", f"{facts.filled} of {plural(block_size, 'slot')}"),
    ]
    if facts.age is not None:
        lines.append(_fact("age", duration(facts.age)))
    if facts.holders:
        owners = [
            f"{names(holder.owner, holder.index) if holder.owner else f'sequence {holder.seq_id}'}"
            f" ({holder.logical_block})"
            for holder in facts.holders
        ]
        lines.append(_fact("owners", f"{', '.join(owners)}"))
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
