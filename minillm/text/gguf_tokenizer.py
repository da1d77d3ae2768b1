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

    Raises WeightsError where the metadata is damaged, or describes a tokenizer that is not supported.
    """
    values = Values("the metadata", metadata)
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
            backend, adds_bos = _sentencepiece(values, tokens, types, vocabulary), True
        else:
            raise WeightsError(f"tokenizer.ggml.model {shown(kind)} is not supported (gpt2 and llama are)")
    except (WeightsError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and where it panics not even an Exception
        raise WeightsError(f"the tokenizer in the metadata is damaged: {clean_line(str(error))}") from None
    hidden = (_CONTROL, _UNKNOWN) if kind == "llama" else (_CONTROL,)
    typed = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text, t in typed if t in hidden])
    backend.add_tokens([AddedToken(text, normalized=False) for text, t in typed if t == _USER_DEFINED])
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if values.has(f"tokenizer.ggml.{key}_token_id"):
            special[f"{name}_token"] = tokens[_token_id(values, key, tokens)]
    # By other names: a token's text could hold the characters that a template's syntax needs.
    around = {
        name.upper(): special[f"{name}_token"]
        for name, default in (("bos", adds_bos), ("eos", False))
        if values.flag(f"tokenizer.ggml.add_{name}_token", default) and f"{name}_token" in special
    }
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[name for name in ("BOS", "$A", "EOS") if name in around or name == "$A"],
            special_tokens=[{"id": name, "ids": [vocabulary[text]], "tokens": [text]} for name, text in around.items()],
        )
    return backend, special, values.text("tokenizer.chat_template", "") or None


def _token_id(values: Values, key: str, tokens: list[str], default: int | None = None) -> int:
    return values.integer(f"tokenizer.ggml.{key}_token_id", default, least=0, most=len(tokens) - 1)


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE; and whether it puts BOS before a text unless told otherwise."""
    name = metadata.get("tokenizer.ggml.pre")
    name = "default" if name in (None, "") else name
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
    if split.composes:
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.patterns]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece(
    values: Values, tokens: list[str], types: list[int], vocabulary: dict[str, int]
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE, which merges the pair with the best score, as BPE with a list of merges in that order."""
    scores: Any = values.values.get("tokenizer.ggml.scores")
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
    unknown = tokens[_token_id(values, "unknown", tokens, 0)]
    pairs = [(left, right) for *_, left, right in merges]
    with quiet():
        model = models.BPE(vocab=vocabulary, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    before: list[Any] = [normalizers.Replace(" ", "▁")]
    after: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.flag("tokenizer.ggml.add_space_prefix", True):
        before.insert(0, normalizers.Prepend("▁"))
        after.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(before), decoders.Sequence(after)
    return backend


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise WeightsError(f"the metadata has no usable tokenizer.ggml.{key}")
    return values
