"""The space that a tokenizer adds before a text (SentencePiece's dummy prefix), and how to avoid it.

A text that continues another must not get that space. minillm begins such a text with a mark, the reserved character
`CONTINUES`. After each step that adds a prefix, another step removes the prefix together with the mark.
"""

from collections.abc import Mapping
from typing import Any

from minillm.text.control_tokens import CONTINUES
from minillm.text.pre_tokenizers import GPT2

Step = Mapping[str, Any]  # a normalizer or a pre-tokenizer, as in tokenizer.json


def with_removal(step: Step | None, members: str) -> tuple[Step | None, bool]:
    """Return ``step`` followed by the removal of its prefix before a mark, and whether ``step`` adds a prefix.

    ``step`` is returned unchanged if it adds none. ``members`` is the key of a sequence's steps: ``normalizers`` or
    ``pretokenizers``.
    """
    kind = None if step is None else step["type"]
    if step is None or kind not in ("Sequence", "Prepend", "Metaspace", "ByteLevel"):
        return step, False
    if kind == "Sequence":
        pairs = [with_removal(each, members) for each in step[members]]
        return {**step, members: [each for each, _ in pairs]}, any(changed for _, changed in pairs)
    found = _removable(step)
    return ({"type": "Sequence", members: found}, True) if found else (step, False)


def _removable(step: Step) -> list[Step]:
    """Return the steps that replace ``step`` if it adds a prefix: they also remove it before a mark.

    Otherwise return an empty list.
    """
    kind = step["type"]
    if kind == "Prepend":
        return [step, {"type": "Replace", "pattern": {"String": step["prepend"] + CONTINUES}, "content": ""}]
    if kind == "Metaspace" and step.get("prepend_scheme", "always") != "never":
        return [step, _split({"String": step["replacement"] + CONTINUES}, "Removed")]
    if kind == "ByteLevel" and step.get("add_prefix_space"):  # its bytes would hide the mark: add the space before
        space = _removable({"type": "Metaspace", "replacement": " ", "prepend_scheme": "always", "split": False})
        words = [_split({"Regex": GPT2}, "Isolated")] if step.get("use_regex", True) else []
        return [*space, *words, {**step, "add_prefix_space": False, "use_regex": False}]
    return []


def _split(pattern: Mapping[str, str], behavior: str) -> Step:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}
