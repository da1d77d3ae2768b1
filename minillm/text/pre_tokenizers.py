"""The pre-tokenizers that GGUF files name in ``tokenizer.ggml.pre``, with llama.cpp's regular expressions.

This module has only the pre-tokenizers of Llama-family models. A wrong pre-tokenizer would tokenize almost correctly,
so unknown names are rejected.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The rules by which a byte-level tokenizer splits a text into pieces before it merges bytes within each piece.

    Attributes:
        patterns: regular expressions, applied in order. Each pattern splits the pieces that the previous pattern gave.
            A match is a piece, and so is the text between two matches.
        ignore_merges: a piece that is a vocabulary entry becomes one token, whatever the merges are.
        adds_bos: BOS is added before a text, unless the file says otherwise.
        composes: letters and their accents are composed first (NFC), as in the models' own tokenizers. llama.cpp skips
            this step.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False


# The cased letters of DeepSeek's expression, by code point.
_CASED = """
0041-005A 0061-007A 00B5 00C0-00D6 00D8-00F6 00F8-01BA 01BC-01BF 01C4-0293 0295-02AF 0370-0373 0376 0377 037B-037D 037F
0386 0388-038A 038C 038E-03A1 03A3-03F5 03F7-0481 048A-052F 0531-0556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF
1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4
1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D
2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3
A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""


def _class_of(code_points: str) -> str:
    """Return the content of a regular expression's character class.

    ``code_points`` are hexadecimal code points and ranges, such as ``0041-005A 00B5``.
    """
    return "".join("-".join(chr(int(end, 16)) for end in entry.split("-")) for entry in code_points.split())


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit is a piece
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    _TEKKEN.replace(r"\p{M}]+|", r"\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")
    .replace(r"\p{M}]*|", r"\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|")
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_class_of(_CASED)}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _IDEOGRAPHS,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_DIGITS_APART = (r"\p{N}", GPT2)

_SEED_CODER = QWEN2.replace(r"[\r\n]*|\s*[\r\n]+", r"|\s*[\r\n]+")  # a line end after punctuation is a separate piece
_VIKING = (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")

# llama.cpp's names of each `Split`.
_LLAMA3_NAMES = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "jina-v5-nano",
)
_QWEN2_NAMES = ("stablelm2", "hunyuan", "solar-open", "grok-2", "kormo", "megrez")
_DIGITS_APART_NAMES = (*("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),)
_GPT2_NAMES = (
    *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0", "mellum"),
    *("modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
)

SPLITS = {
    **dict.fromkeys(_LLAMA3_NAMES, Split((LLAMA3,), True, True)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), Split((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2"), Split((QWEN2,), composes=True)),
    **dict.fromkeys(_QWEN2_NAMES, Split((QWEN2,))),
    "tekken": Split((_TEKKEN,), True, True),
    **dict.fromkeys(_DIGITS_APART_NAMES, Split(_DIGITS_APART)),
    **dict.fromkeys(_GPT2_NAMES, Split((GPT2,))),
    "deepseek-llm": Split(_DEEPSEEK_LLM),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Split(_DEEPSEEK_V3)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), Split((_GPT4O,))),
    "seed-coder": Split((_SEED_CODER,)),
    "viking": Split(_VIKING),
    "default": Split(_DEFAULT),  # for older files without the key
}
