"""Convert a grammar to the syntax of the library llguidance, and limit the library's work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from minillm.errors import UsageError
from minillm.grammar.rewriting import supported

if TYPE_CHECKING:
    import llguidance

# White space between two tokens of JSON. If it were unlimited, small models would sometimes generate nothing else.
WHITE_SPACE = r" {1,2}|\r?\n[ \t]{0,48}"
# The first two values limit the time of one step of one sequence, to 14 ms and 2.5 ms at the library's own rates.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


def library() -> Any:
    """Import and return llguidance, which is imported on first use. Raises UsageError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UsageError("grammar: the package llguidance is not installed here; install it") from None
    return llguidance


def notation(kind: str, source: str) -> str:
    """Convert a grammar to llguidance's syntax, for `limited_matcher`. Syntax errors are found only there.

    ``kind`` and ``source`` are those of `Grammar`. Raises UsageError if llguidance is not installed, or if a JSON
    schema is not supported.
    """
    matcher = library().LLMatcher
    if kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if kind == "json_object" else json.loads(source)
        text: str = matcher.grammar_from_json_schema(followed(schema), overrides={"whitespace_pattern": WHITE_SPACE})
    elif kind == "regex":
        text = matcher.grammar_from_regex(source)
    elif kind == "choice":
        texts = dict.fromkeys(json.loads(source))
        choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in texts)
        text = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    else:
        text = matcher.grammar_from_lark(source)
    return text


def followed(schema: Any) -> dict[str, Any]:
    """Rewrite a schema to an object that llguidance supports.

    Raises UsageError with the name of an unsupported keyword.
    """
    found = supported(schema)
    if isinstance(found, bool):  # true or false: anything or nothing
        return {} if found else {"enum": []}
    return found


def limited_matcher(tokenizer: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    """Compile ``text``, a grammar in llguidance's syntax, for a vocabulary. If this fails, the matcher has an error."""
    import llguidance

    return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
