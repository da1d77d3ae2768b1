"""Add the tokens that the files next to tokenizer.json declare, as transformers does.

A named token is the value of a key such as ``eos_token``. Named tokens are added and are special. The tokens in
``extra_special_tokens``, formerly ``additional_special_tokens``, are added as well. The other tokens come from
``added_tokens_decoder`` in tokenizer_config.json. If this key is missing, they come from added_tokens.json, and
special_tokens_map.json overrides the named tokens.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from minillm.errors import WeightsError
from minillm.text.reading import is_there, read_json, shown

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
_TABLE = "added_tokens_decoder"
_MOST_ADDED = 1 << 28  # maximum estimate, in bytes, of the memory for the prefixes of all added tokens


def read_config(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json. Raises WeightsError if a file is damaged.

    If tokenizer_config.json has no ``added_tokens_decoder``, keys of special_tokens_map.json override its other keys.
    """
    config, named = (_read(directory / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    return config if _TABLE in config else {**config, **named}


def named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return the named tokens, such as ``eos_token``, by name. The standard names of transformers come first."""
    extra = _extra(config)
    values = {**config, **(extra if isinstance(extra, Mapping) else {})}
    names = [name for name in values if name.endswith("_token") or (isinstance(extra, Mapping) and name in extra)]
    found = {name: values[name] for name in dict.fromkeys((*_NAMES, *names)) if name in values}
    return {name: _token(value, name, special=True) for name, value in found.items() if isinstance(value, str | dict)}


def add_declared(backend: tokenizers.Tokenizer, directory: Path, config: Mapping[str, Any]) -> None:
    """Add the declared tokens that the backend lacks. For tokens that the backend has, set the declared flags.

    Raises WeightsError if a declaration is damaged.
    """
    own, named, extra = backend.get_added_tokens_decoder(), named_tokens(config), _extra(config)
    values = extra if isinstance(extra, list) else ()
    more = [_token(value, "extra_special_tokens", special=isinstance(value, str)) for value in values]
    names = {token.content for token in named.values()}
    if _TABLE in config:
        table = {_id(key): _token(value, _TABLE) for key, value in _object(config[_TABLE], _TABLE).items()}
    else:
        known = names | {token.content for token in more}
        table = {**_of_file(directory / "added_tokens.json", known), **own}
    special = names | {token.content for token in own.values() if token.special}  # once special, always special
    declared = [_made_special(token, special) for _, token in sorted(table.items())]
    known = {token.content for token in (*own.values(), *declared)}
    declared += [token for token in dict.fromkeys((*named.values(), *more)) if token.content not in known]
    check_added(token.content for token in declared)
    present = {token.content: token for token in own.values()}
    changed = [token for token in declared if not _is_same(present.get(token.content), token)]
    if changed:
        backend.add_tokens(changed)


def check_added(texts: Iterable[str]) -> None:
    """Raise WeightsError if added tokens with these texts take more memory than those of any known model."""
    lengths = list(map(len, texts))
    if sum(length * (length + 64) for length in lengths) > _MOST_ADDED:
        raise WeightsError(f"{len(lengths)} added tokens of up to {max(lengths)} characters, which no model has")


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if is_there(path) else {}


def _extra(config: Mapping[str, Any]) -> Any:
    return config.get("extra_special_tokens") or config.get("additional_special_tokens") or []


def _of_file(path: Path, special: set[str]) -> dict[int, AddedToken]:
    """Read the tokens of an added_tokens.json. Tokens with a text in ``special`` become special tokens.

    The file itself has no flags that say which tokens are special.
    """
    return {_id(number): _token(text, path.name, special=text in special) for text, number in _read(path).items()}


def _token(value: Any, where: str, *, special: bool = False) -> AddedToken:
    """Create a token from its text, or from a JSON object with its content and flags."""
    found = {"content": value} if isinstance(value, str) else _object(value, where)
    text, flags = found.get("content"), {name: found[name] for name in _FLAGS if found.get(name) is not None}
    if not isinstance(text, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise WeightsError(f"{where} holds {shown(value)}, which is not a token")
    return AddedToken(text, **{**flags, **({"special": True} if special else {})})


def _made_special(token: AddedToken, special: set[str]) -> AddedToken:
    if token.special or token.content not in special:
        return token
    return AddedToken(**{**token.__getstate__(), "special": True})


def _is_same(one: AddedToken | None, other: AddedToken) -> bool:
    return one is other or (one is not None and one.__getstate__() == other.__getstate__())


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise WeightsError(f"{where} must hold an object, not {shown(value)}")
    return value


def _id(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise WeightsError(f"{shown(value)} is not an id of an added token") from None
