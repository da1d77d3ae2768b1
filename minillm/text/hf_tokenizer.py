"""Tokenizers in Hugging Face's layout: tokenizer.json and the files next to it.

A tokenizer.json comes with the model and is untrusted. Its steps (normalizer, pre-tokenizer, post-processor) can be
harmful. For example, a regular expression may never end, a replacement may turn one character into a thousand, or data
may make the tokenizers library panic. If every step is known to take time linear in the text, the tokenizer runs in
this process. Otherwise it runs in a `minillm.text.sandbox`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from minillm.errors import WeightsError
from minillm.text.control_tokens import admissible
from minillm.text.declared_tokens import add_declared, check_added, named_tokens, read_config
from minillm.text.gguf_tokenizer import SPLITS
from minillm.text.reading import is_there, read_bytes
from minillm.text.safe import clean_line
from minillm.text.sandbox import Sandbox, quiet

_MAX_BYTES = 64 << 20  # maximum size of a tokenizer.json; the largest known files have 33 MB
_MEMORY_BYTES, _MEMORY_PER_BYTE = 1 << 30, 16  # memory limit of a sandbox: a constant, and bytes per byte of the file

# The steps of a tokenizer, each with the key of the list of steps if it is a sequence of several.
STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
_PATTERNS = {pattern for split in SPLITS.values() for pattern in split.patterns}
# Maximum factors by which steps lengthen a text in bytes. The Unicode standard states those of normalization forms.
_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 3, "Strip": 1, "StripAccents": 1, "Prepend": 1}
_GROWTH |= {"ByteLevel": 2, "Metaspace": 4, "Digits": 1, "Whitespace": 1, "WhitespaceSplit": 1, "Punctuation": 1}
_GROWTH |= {"TemplateProcessing": 1, "BertProcessing": 1, "RobertaProcessing": 1}
_MOST_GROWTH = 100.0
_MOST_STEPS = 32
_LONGEST = 64  # characters that a step adds before a text


def read_directory(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None, dict[str, Any] | None]:
    """Read tokenizer.json and the files next to it.

    Raises WeightsError if tokenizer.json is missing, or if a file is damaged.

    Returns:
        - the tokenizer, without the steps that must not run in this process;
        - its special tokens by name (``bos_token``, ``eos_token``, …);
        - its chat template, or None;
        - the steps that must not run in this process, as in tokenizer.json, or None.
    """
    path = directory / "tokenizer.json"
    if not is_there(path):
        raise WeightsError(f"{path} is missing: only fast tokenizers (tokenizer.json) are supported")
    steps, config = None, read_config(directory)
    with _damage_named(path):
        data = read_bytes(path, _MAX_BYTES)
        document = json.loads(data, object_pairs_hook=_unique)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
        added = document.get("added_tokens") or []
        check_added(token["content"] for token in added if isinstance(token, dict) and "content" in token)
        if not is_known(document):
            encoder_of(document).ask({"text": "a", "special": True})  # the library may panic on it
            steps = {name: document.get(name) for name in STEPS}
            data = json.dumps({**document, **dict.fromkeys(STEPS)}).encode()
        with quiet():
            backend = tokenizers.Tokenizer.from_buffer(data)
    backend.no_truncation()
    backend.no_padding()
    with _damage_named(directory / "tokenizer_config.json"), quiet():
        add_declared(backend, directory, config)
        special = {name: admissible(token.content) for name, token in named_tokens(config).items()}
    return backend, special, _template(directory / "chat_template.jinja", config), steps


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Convert any exception to a WeightsError that names the file."""
    try:
        yield
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and its panics are not even an Exception
        raise WeightsError(f"{path}: {clean_line(str(error))}") from None


def encoder_of(document: Mapping[str, Any]) -> Sandbox:
    """Return a sandbox that loads ``document``, the content of a tokenizer.json: see `minillm.text.sandbox_process`."""
    data = json.dumps(document)
    memory = _MEMORY_BYTES + _MEMORY_PER_BYTE * len(data)
    return Sandbox("tokenizer", memory, {"tokenizer": data})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object from its pairs. Raises ValueError for a repeated key.

    With a repeated key, minillm could check one value, and the tokenizers library could use another.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def is_known(document: Mapping[str, Any]) -> bool:
    """Return whether every step of a tokenizer.json is known to be harmless, so that it may run in this process.

    ``document`` is the content of the file. All steps together must not lengthen a text by more than a factor of
    `_MOST_GROWTH`.
    """
    try:
        model = document["model"]
        affixes = [model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")]
        if "merges" not in model or model.get("type", "BPE") != "BPE" or model.get("dropout"):
            return False
        found = [(document[name], plural) for name, plural in STEPS.items() if document.get(name) is not None]
        steps = [each for step, plural in found for each in (step[plural] if step["type"] == "Sequence" else [step])]
        growth = math.prod(map(_growth, steps), start=1.0)
        return growth <= _MOST_GROWTH and len(steps) <= _MOST_STEPS and not any(affixes)
    except (KeyError, TypeError, AttributeError, OverflowError):  # an unknown layout
        return False


def _growth(step: Mapping[str, Any]) -> float:
    """Return the maximum factor by which a step of a tokenizer lengthens a text in bytes; infinity if unknown."""
    kind: Any = step["type"]
    pattern: Any = step.get("pattern")
    if kind == "Split" and pattern.get("Regex") in _PATTERNS:
        return 1
    if kind in ("Split", "Replace") and pattern.get("String"):
        return max(1.0, len(step.get("content", "").encode()) / len(pattern["String"].encode()))
    used = [part["SpecialToken"]["id"] for part in step.get("single", ()) if "SpecialToken" in part]
    if len(step.get("prepend", "")) > _LONGEST or not set(used) <= set(step.get("special_tokens", ())):
        return float("inf")
    return _GROWTH.get(kind, float("inf"))


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template, or None for a model without one.

    The template is the text of the file ``path``. If this file is missing or empty, the template comes from the
    config's key ``chat_template``: a text, or a list of named templates, of which the one named "default" is used.
    """
    try:
        if is_there(path) and (text := read_bytes(path).decode("utf-8", errors="replace")):
            return text
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    value = config.get("chat_template")
    if isinstance(value, list):
        named = [entry.get("template") for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[-1] if named else None
    return value if isinstance(value, str) else None
