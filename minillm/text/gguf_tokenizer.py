"""Tokenizers rebuilt from a GGUF file's metadata.

GGUF stores a vocabulary and the *name* of the pre-tokenizer: see `minillm.text.pre_tokenizers`.
"""

import math
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from minillm.errors import WeightsError
from minillm.text.pre_tokenizers import SPLITS
from minillm.text.reading import Values, shown
from minillm.text.safe import clean_line
from minillm.text.sandbox import quiet

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_UNKNOWN = 2
_MAX_TOKEN = 1 << 10  # characters


def rebuild(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None]:
    """The tokenizer, its special tokens by name (``bos_token``, ``eos_token``, …), and its chat template if it has one.

    Raises:
        WeightsError: the metadata is damaged, or describes a tokenizer that is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _texts(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not all(type(kind) is int for kind in types):
        raise WeightsError("tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN:
        raise WeightsError(f"tokenizer.ggml.tokens holds a token of {longest} characters, which no model has")
    vocabulary = {text: token_id for token_id, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(text for token_id, text in enumerate(tokens) if vocabulary[text] != token_id)
        raise WeightsError(f"tokenizer.ggml.tokens holds {clean_line(twice)!r} twice")
    try:
        if kind == "gpt2":
            backend, adds_bos = _byte_level(metadata, vocabulary)
        elif kind == "llama":
            backend, adds_bos = _sentencepiece(metadata, tokens, types, vocabulary), True
        else:
            raise WeightsError(f"tokenizer.ggml.model {shown(kind)} is not supported (gpt2 and llama are)")
    except (WeightsError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and where it panics not even an Exception
        raise WeightsError(f"the tokenizer in the metadata is damaged: {clean_line(str(error))}") from None
    hidden = (_CONTROL, _UNKNOWN) if kind == "llama" else (_CONTROL,)
    control = [AddedToken(tokens[i], special=True, normalized=False) for i, t in enumerate(types) if t in hidden]
    backend.add_special_tokens(control)
    own = [AddedToken(tokens[i], special=False, normalized=False) for i, t in enumerate(types) if t == _USER_DEFINED]
    backend.add_tokens(own)
    special = _special_tokens(metadata, tokens)
    wanted = (("bos", _wanted(metadata, "bos", adds_bos)), ("eos", _wanted(metadata, "eos", False)))
    # By other names: a token's text could hold the characters that a template's syntax needs.
    around = {
        name.upper(): special[f"{name}_token"] for name, is_put in wanted if is_put and f"{name}_token" in special
    }
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[name for name in ("BOS", "$A", "EOS") if name in around or name == "$A"],
            special_tokens=[{"id": name, "ids": [vocabulary[text]], "tokens": [text]} for name, text in around.items()],
        )
    template = Values("the metadata", metadata).text("tokenizer.chat_template", "")
    return backend, special, template or None


def _wanted(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.add_{name}_token", default)
    if not isinstance(value, bool):
        raise WeightsError(f"tokenizer.ggml.add_{name}_token {shown(value)} is neither true nor false")
    return value


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE; and whether it puts BOS before a text unless told otherwise."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None or name == "":
        name = "default"
    if not isinstance(name, str) or name not in SPLITS:
        raise WeightsError(
            f"tokenizer.ggml.pre {shown(name)} is not supported, and guessing would tokenise wrongly; "
            f"supported: {', '.join(SPLITS)}"
        )
    split = SPLITS[name]
    merges = [(left, right) for left, _, right in (each.partition(" ") for each in _texts(metadata, "merges"))]
    for left, right in merges:
        if not right or not {left, right, left + right} <= vocabulary.keys():
            pair = clean_line(f"{left} {right}")
            raise WeightsError(f"tokenizer.ggml.merges holds {pair!r}, no pair of known tokens")
    with quiet():
        model = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=split.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    cuts: list[Any] = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.patterns]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], vocabulary: dict[str, int]
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE, which merges the pair with the best score, as BPE with a list of merges in that order."""
    scores: Any = metadata.get("tokenizer.ggml.scores")
    sound = isinstance(scores, list) and all(type(score) is float and math.isfinite(score) for score in scores)
    if not sound or len(scores) != len(tokens):
        raise WeightsError("tokenizer.ggml.scores does not fit tokenizer.ggml.tokens")
    mergeable = {text for text, kind in zip(tokens, types, strict=True) if kind not in (_UNKNOWN, _CONTROL, _BYTE)}
    merges = []
    for text in mergeable:
        score = scores[vocabulary[text]]
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in mergeable and right in mergeable:
                merges.append((-score, vocabulary[text], vocabulary[left], left, right))
    merges.sort(key=lambda merge: merge[:3])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise WeightsError(f"tokenizer.ggml.unknown_token_id {shown(unknown)} is not a token")
    pairs = [(left, right) for *_, left, right in merges]
    with quiet():
        model = models.BPE(vocab=vocabulary, merges=pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefixed else [replace])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise WeightsError(f"the metadata has no usable tokenizer.ggml.{key}")
    return values


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise WeightsError(f"tokenizer.ggml.{key}_token_id {shown(token_id)} is not a token")
        special[f"{name}_token"] = tokens[token_id]
    return special
