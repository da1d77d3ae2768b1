"""Convert every accepted kind of prompt to text or a list of Python ints."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from operator import countOf, index
from typing import Any

from minillm.checks import shown
from minillm.errors import UsageError

Prompt = str | Sequence[int]


def prompt_list(prompts: Any) -> list[Prompt]:
    """Return a list of prompts, given one prompt or several.

    Raises UsageError for other types. The prompts themselves are not checked.
    """
    found = _unwrapped(prompts)
    found = found.tolist() if hasattr(found, "tolist") else found  # an array or a tensor
    if isinstance(found, str):
        return [found]
    if not isinstance(found, Iterable) or isinstance(found, bytes | bytearray | Mapping):
        raise UsageError(f"prompts are text, token ids, or a list of either, not {type(prompts).__name__}")
    many = list(found)
    return [many] if many and isinstance(many[0], Integral) else [_unwrapped(each) for each in many]


def plain_ids(prompt: Any) -> list[int]:
    """Return token ids from a list, a range, an array or a tensor. Raises UsageError for other types and values.

    The ids are not checked against a vocabulary.
    """
    found = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # an array or a tensor
    if not isinstance(found, Sequence) or isinstance(found, str | bytes | bytearray):
        raise UsageError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
    ids = list(found)
    if countOf(map(type, ids), int) != len(ids):  # for example numpy integers
        for each in ids:
            if not isinstance(each, Integral) or isinstance(each, bool):
                raise UsageError(f"a prompt is text or a list of token ids, and {shown(each)} is no token id")
        ids = [index(each) for each in ids]
    return ids


def _unwrapped(prompt: Any) -> Any:
    """Return the prompt that is wrapped in a dictionary, as in vLLM. Return any other value unchanged.

    The dictionary has the key ``prompt`` (text), ``prompt_token_ids``, or both. Token ids take precedence over text.
    """
    if isinstance(prompt, Mapping) and prompt and set(prompt) <= {"prompt", "prompt_token_ids"}:
        return prompt.get("prompt_token_ids", prompt.get("prompt"))
    return prompt
