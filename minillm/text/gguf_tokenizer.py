"""Rebuild tokenizers from a GGUF file's metadata.

GGUF stores a vocabulary and the *name* of a pre-tokenizer. `minillm.text.pre_tokenizers` defines the pre-tokenizers.
"""

import math
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from minillm.errors import WeightsError
from minillm.text.gguf_tokens import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Tokens, read_tokens, texts_of
from minillm.text.pre_tokenizers import SPLITS
from minillm.text.reading import Values, shown
from minillm.text.safe import clean_line
from minillm.text.sandbox import quiet

_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def rebuild(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None]:
    """Rebuild a tokenizer. Raises WeightsError if the metadata is damaged, or the tokenizer is not supported.

    Returns:
        - the tokenizer;
        - its special tokens by name (``bos_token`` and so on);
        - its chat template, or None.
    """
    values = Values("the metadata", metadata)
    kind, tokens = metadata.get("tokenizer.ggml.model"), read_tokens(values)
    try:
        if kind == "gpt2":
            backend, adds_bos = _byte_level(metadata, tokens)
        elif kind == "llama":
            backend, adds_bos = _sentencepiece(values, tokens), True
        else:
            raise WeightsError(f"tokenizer.ggml.model {shown(kind)} is not supported (gpt2 and llama are)")
    except (WeightsError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and its panics are not even an Exception
        raise WeightsError(f"the tokenizer in the metadata is damaged: {clean_line(str(error))}") from None
    hidden = (CONTROL, UNKNOWN) if kind == "llama" else (CONTROL,)
    typed = list(zip(tokens.texts, tokens.kinds, strict=True))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text, t in typed if t in hidden])
    backend.add_tokens([AddedToken(text, normalized=False) for text, t in typed if t == USER_DEFINED])
    special = {_NAMES[name]: tokens.texts[token_id] for name, token_id in tokens.special.items() if name in _NAMES}
    # Use placeholder names: a token's text could contain characters of the template syntax.
    around = {
        name.upper(): special[f"{name}_token"]
        for name, default in (("bos", adds_bos), ("eos", False))
        if values.flag(f"tokenizer.ggml.add_{name}_token", default) and f"{name}_token" in special
    }
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[name for name in ("BOS", "$A", "EOS") if name in around or name == "$A"],
            special_tokens=[{"id": name, "ids": [tokens.ids[text]], "tokens": [text]} for name, text in around.items()],
        )
    return backend, special, values.text("tokenizer.chat_template", "") or None


def _byte_level(metadata: Mapping[str, Any], tokens: Tokens) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether it adds BOS before a text by default.

    The metadata may override this default.
    """
    name = metadata.get("tokenizer.ggml.pre")
    name = "default" if name in (None, "") else name
    if not isinstance(name, str) or name not in SPLITS:
        raise WeightsError(
            f"tokenizer.ggml.pre {shown(name)} is not supported, and a guess would tokenize wrongly; "
            f"supported: {', '.join(SPLITS)}"
        )
    split = SPLITS[name]
    # Merges that involve unknown tokens never apply.
    pairs = [(left, right) for left, _, right in (each.partition(" ") for each in texts_of(metadata, "merges"))]
    merges = [pair for pair in pairs if all(pair) and {*pair, "".join(pair)} <= tokens.ids.keys()]
    with quiet():
        model = models.BPE(vocab=tokens.ids, merges=merges, fuse_unk=False, ignore_merges=split.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if split.composes:
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.patterns]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece(values: Values, tokens: Tokens) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer that merges like SentencePiece.

    SentencePiece always merges the pair that gives the token with the best score. BPE does the same if its merges are
    sorted by score. Merges with equal or missing scores are sorted by token id, because SentencePiece numbers tokens in
    the order of their scores.
    """
    scores: Any = values.values.get("tokenizer.ggml.scores", [0.0] * len(tokens.texts))
    sound = isinstance(scores, list) and all(type(score) in (int, float) and math.isfinite(score) for score in scores)
    if not sound or len(scores) < len(tokens.texts):
        raise WeightsError("tokenizer.ggml.scores does not fit tokenizer.ggml.tokens")
    ids, apart = tokens.ids, (UNKNOWN, CONTROL, BYTE)
    mergeable = {text for text, kind in zip(tokens.texts, tokens.kinds, strict=True) if kind not in apart}
    merges = []
    for text in mergeable:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in mergeable and right in mergeable:
                merges.append((-scores[ids[text]], ids[text], ids[left], left, right))
    merges.sort(key=lambda merge: merge[:3])
    pairs = [(left, right) for *_, left, right in merges]
    unknown = tokens.texts[tokens.special["unknown"]]
    with quiet():
        model = models.BPE(vocab=ids, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    before: list[Any] = [normalizers.Replace(" ", "▁")]
    after: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.flag("tokenizer.ggml.add_space_prefix", True):
        before.insert(0, normalizers.Prepend("▁"))
        after.append(decoders.Strip(" ", 1, 0))
    backend.normalizer, backend.decoder = normalizers.Sequence(before), decoders.Sequence(after)
    return backend
