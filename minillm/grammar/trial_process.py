"""The process of `minillm.grammar.trial`: compiles one grammar for a vocabulary of single bytes.

It reads one JSON object from stdin. It writes a JSON object with the ``fault`` of the grammar to stdout. The fault is
null if the grammar compiles. This file imports nothing of minillm.
"""

import json
import resource
import sys
from typing import Any

import llguidance

_END = 256  # the id after the bytes


class Bytes:
    """A vocabulary with one token for each byte. It has the interface that llguidance expects of a tokenizer."""

    eos_token_id, bos_token_id = _END, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (_END,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def fault(request: dict[str, Any]) -> str | None:
    """Compile the request's grammar. Return why the grammar cannot be used, or None if it can be used."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=257, eos_token=_END)
    limits = llguidance.LLParserLimits(**request["limits"])
    matcher = llguidance.LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
    if matcher.is_error():
        return str(matcher.get_error())
    mask = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << _END) - 1)
    if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):
        return str(matcher.get_error())
    return None if mask else "it allows no text"


def main() -> None:
    request = json.load(sys.stdin)
    seconds, memory = request["seconds"], request["memory"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.write(json.dumps({"fault": fault(request)}))


if __name__ == "__main__":
    main()
