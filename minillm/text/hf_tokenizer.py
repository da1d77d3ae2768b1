"""Tokenizers in Hugging Face's layout: tokenizer.json, and what lies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from minillm.errors import WeightsError
from minillm.text.control_tokens import admissible
from minillm.text.reading import is_there, read_bytes, read_json
from minillm.text.safe import clean_line

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_BYTES = 256 << 20  # of a tokenizer.json; the largest we know have 33 MB


def read_directory(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None]:
    """The tokenizer, its special tokens by name (``bos_token``, ``eos_token``, …), and its chat template if it has one.

    Raises:
        WeightsError: tokenizer.json is missing or damaged.
    """
    path = directory / "tokenizer.json"
    if not is_there(path):
        raise WeightsError(f"{path} is missing: only fast tokenizers (tokenizer.json) are supported")
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_bytes(path, _MAX_BYTES))
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
    return backend, special, template


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
