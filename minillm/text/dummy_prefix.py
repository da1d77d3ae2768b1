"""The space that a tokenizer adds before a text (SentencePiece's dummy prefix), and how to avoid it.

A text that continues another text must not get this space. minillm begins such a text with a mark, the reserved
character `CONTINUES`. After each step of the tokenizer that adds a prefix, minillm inserts a step that removes the
prefix together with the mark.
"""

from collections.abc import Mapping
from typing import Any

from minillm.text.control_tokens import CONTINUES
from minillm.text.pre_tokenizers import GPT2

Step = Mapping[str, Any]  # a normalizer or a pre-tokenizer, as in tokenizer.json


def with_removal(step: Step | None, members: str) -> tuple[Step | None, bool]:
    """Return a step that adds no prefix to a marked text, and whether ``step`` adds a prefix to any other text.

    A marked text begins with the reserved character `CONTINUES`. If ``step`` adds no prefix, it is returned unchanged.
    Otherwise the returned step runs ``step``, and then removes the prefix and the mark.

    Args:
        step: a normalizer or pre-tokenizer, as in tokenizer.json; None: there is none.
        members: the key under which a Sequence has its steps, ``normalizers`` or ``pretokenizers``.
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
    """Return the steps that replace ``step`` if it adds a prefix. Otherwise return an empty list.

    The returned steps also add the prefix. From a text that begins with the mark `CONTINUES`, they remove it again.
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
