"""The tokens in a GGUF file's metadata: their texts and kinds, the special tokens, and the tokens that end an answer.

Files can be wrong. For example, a fine-tuned model keeps the base model's end token, or a converter marks
``<|im_end|>`` as a word. llama.cpp corrects such tokens by their texts (src/llama-vocab.cpp), and authors test their
files with llama.cpp. minillm makes the same corrections, with one exception. If a byte-level file names no end token,
llama.cpp ends answers at token 11, whatever its text is. minillm does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm.errors import WeightsError
from minillm.text.reading import Values
from minillm.text.safe import clean_line

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
_MAX_TOKEN = 1 << 10  # characters

# Tokens with these texts end an answer.
_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
        *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    )
)
# Tokens with these texts also end an answer, unless a key of the metadata names a token for the same purpose.
_ENDS_BY_KEY = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Tokens for fill-in-the-middle, in code models.
_FILL_IN = (
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
    *("<|prefix|>", "<|suffix|>", "<|middle|>"),
)
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # decoded as text, for parsers of gpt-oss answers
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # defaults
_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding", *_ENDS_BY_KEY)


@dataclass(frozen=True)
class Tokens:
    """A vocabulary.

    Attributes:
        texts: the text of each token, by id.
        kinds: the GGUF token type of each token, by id: NORMAL, UNKNOWN, CONTROL, ….
        ids: the id of each token, by text.
        special: the ids of special tokens by name (``bos``, ``eos``, ``unknown``, …).
    """

    texts: list[str]
    kinds: list[int]
    ids: dict[str, int]
    special: dict[str, int]


def read_tokens(values: Values) -> Tokens:
    """Read the tokens of GGUF metadata, and correct the token types of known texts.

    For example, an end token may be marked as ordinary text. Raises WeightsError if the metadata is damaged.
    """
    found = texts_of(values.values, "tokens")
    kinds = values.values.get("tokenizer.ggml.token_type", [NORMAL] * len(found))
    if not isinstance(kinds, list) or len(kinds) < len(found) or not all(type(kind) is int for kind in kinds):
        raise WeightsError("tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")
    longest = max(map(len, found))
    if longest > _MAX_TOKEN:
        raise WeightsError(f"tokenizer.ggml.tokens holds a token of {longest} characters, which no model has")
    texts = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(found)]
    ids = {text: token_id for token_id, text in enumerate(texts)}
    if len(ids) != len(texts):
        twice = next(text for token_id, text in enumerate(texts) if ids[text] != token_id)
        raise WeightsError(f"tokenizer.ggml.tokens holds {clean_line(twice)!r} twice")
    kinds, special = kinds[: len(texts)], special_ids(values, len(texts))
    by_text = dict.fromkeys((*_ends_by_text(special), *_FILL_IN), CONTROL) | dict.fromkeys(_SHOWN, USER_DEFINED)
    for text, kind in (by_text | _not_ends(ids)).items():
        if text in ids:
            kinds[ids[text]] = kind
    return Tokens(texts, kinds, ids, special)


def texts_of(metadata: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of texts at ``tokenizer.ggml.KEY``. Raises WeightsError if it is missing, empty or invalid."""
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise WeightsError(f"the metadata has no usable tokenizer.ggml.{key}")
    return values


def special_ids(values: Values, count: int) -> dict[str, int]:
    """Return the ids of special tokens by name, from the metadata or from SentencePiece's defaults.

    ``count`` is the number of tokens. Invalid ids are ignored. Raises WeightsError if a value is not an integer.
    """
    defaults = _SENTENCEPIECE_IDS if values.values.get("tokenizer.ggml.model") == "llama" else {}
    found: dict[str, int] = {}
    for name in _NAMES:
        default = defaults.get(name, -1)
        given = values.integer(f"tokenizer.ggml.{name}_token_id", default, least=-(1 << 63), most=1 << 64)
        for token_id in (given, default):
            if 0 <= token_id < count:
                found.setdefault(name, token_id)
    return found


def end_ids(values: Values, count: int) -> list[int]:
    """Return the ids of the tokens that end an answer, the file's own end token first.

    ``count`` is the number of rows of the model's embedding. Ids without a row are left out.
    """
    tokens = values.values.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, list) else []
    special = special_ids(values, min(count, len(texts)) or count)
    by_text = _ends_by_text(special)
    ids = {text: token_id for token_id, text in enumerate(texts[:count]) if text in by_text}
    ends = [special[name] for name in ("eos", "eot", "eom", *_ENDS_BY_KEY) if name in special]
    # In gpt-oss and Solar Open, <|end|> ends one of several messages; in Gemma 4, </s> is a word.
    not_ends = {ids.get(text) for text in _not_ends(ids)}
    return [each for each in dict.fromkeys([*ends, *ids.values()]) if each not in not_ends]


def _ends_by_text(special: Mapping[str, int]) -> frozenset[str]:
    return _ENDS.union(*(texts for name, texts in _ENDS_BY_KEY.items() if name not in special))


def _not_ends(texts: Mapping[str, int]) -> dict[str, int]:
    """Return tokens of this vocabulary that do not end an answer, although they do in other vocabularies.

    ``texts`` maps the text of each token in this vocabulary to its id. The result maps the text of each returned token
    to the token type that it has in this vocabulary.
    """
    found = {}
    calls = bool({"<|call|>", "<|calls|>"} & texts.keys())
    if calls and {"<|return|>", "<|flush|>"} & texts.keys():
        found["<|end|>"] = USER_DEFINED
    if "<|tool_response>" in texts:
        found["</s>"] = NORMAL
    return found
