"""Tokenizers in Hugging Face's layout: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from minillm.errors import WeightsError
from minillm.text.control_tokens import admissible
from minillm.text.known_steps import STEPS, check_added, is_known
from minillm.text.reading import is_there, read_bytes, read_json
from minillm.text.safe import clean_line
from minillm.text.sandbox import Sandbox, quiet

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_BYTES = 64 << 20  # of a tokenizer.json; the largest we know have 33 MB
_MEMORY_BYTES, _MEMORY_PER_BYTE = 1 << 30, 16  # for a tokenizer in a sandbox, and for each byte of its file


@dataclass(frozen=True)
class Parts:
    """A tokenizer as its files describe it.

    Attributes:
        special_tokens: by name: ``bos_token``, ``eos_token``, …
        steps: those of a tokenizer.json that must not run in this process: see `minillm.text.known_steps`. The backend
            is without them.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | None
    steps: Mapping[str, Any] | None = None


def read_directory(directory: Path) -> Parts:
    """Read tokenizer.json and the files beside it.

    Raises:
        WeightsError: tokenizer.json is missing or damaged.
    """
    path = directory / "tokenizer.json"
    if not is_there(path):
        raise WeightsError(f"{path} is missing: only fast tokenizers (tokenizer.json) are supported")
    steps = None
    try:
        data = read_bytes(path, _MAX_BYTES)
        document = json.loads(data, object_pairs_hook=_unique)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
        check_added(document)
        if not is_known(document):
            encoder_of(document).ask({"text": "a", "special": True})  # a panic of the library happens there
            steps = {name: document.get(name) for name in STEPS}
            data = json.dumps({**document, **dict.fromkeys(STEPS)}).encode()
        with quiet():
            backend = tokenizers.Tokenizer.from_buffer(data)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and where it panics not even an Exception
        raise WeightsError(f"{path}: {clean_line(str(error))}") from None
    backend.no_truncation()
    backend.no_padding()
    config: dict[str, Any] = {}
    for file in (directory / "special_tokens_map.json", directory / "tokenizer_config.json"):
        config |= read_json(file) if is_there(file) else {}
    special = {name: text for name in _NAMES if (text := _token_text(config.get(name))) is not None}
    template = _template_file(directory / "chat_template.jinja") or _named_template(config.get("chat_template"))
    return Parts(backend, special, template, steps)


def encoder_of(document: Mapping[str, Any]) -> Sandbox:
    """A process that has loaded a tokenizer.json: see `minillm.text.tokenizer_process`."""
    data = json.dumps(document)
    memory = _MEMORY_BYTES + _MEMORY_PER_BYTE * len(data)
    return Sandbox("tokenizer_process.py", "tokenizer", memory, {"tokenizer": data})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys, for the library might take the other value of such a key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _token_text(value: Any) -> str | None:
    """A token in a config is text, or an object that has it as content."""
    content = value.get("content") if isinstance(value, dict) else value
    return admissible(content) if isinstance(content, str) else None


def _template_file(path: Path) -> str | None:
    try:
        return read_bytes(path).decode("utf-8", errors="replace") if is_there(path) else None
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None


def _named_template(value: Any) -> str | None:
    """One template, or a list of named ones of which "default" is for chats."""
    if isinstance(value, list):
        named = [entry.get("template") for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[-1] if named else None
    return value if isinstance(value, str) else None
