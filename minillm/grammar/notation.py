"""A grammar in the notation of the library llguidance, and the bounds within which it works."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from minillm.errors import UsageError
from minillm.grammar.rewriting import supported

if TYPE_CHECKING:
    import llguidance

# Between two tokens of JSON. Small models that may write any amount of white space sometimes write nothing else.
WHITE_SPACE = r" {1,2}|\r?\n[ \t]{0,48}"
# For one step of one sequence: 14 ms and 2.5 ms at the library's own rates.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


def library() -> Any:
    """The library, which nothing imports before there is a grammar. Raises UsageError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UsageError("grammar: the package llguidance is not installed here; install it") from None
    return llguidance


def notation(kind: str, source: str) -> str:
    """The grammar as `limited_matcher` takes it; its syntax is not looked at. Raises UsageError as `library` does."""
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
    """Return a schema as the library can follow it. Raises UsageError, which names a keyword that it cannot follow."""
    found = supported(schema)
    if isinstance(found, bool):  # anything, and nothing
        return {} if found else {"enum": []}
    return found


def limited_matcher(tokenizer: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    """Compile a grammar for a vocabulary; where that fails, the matcher has an error."""
    import llguidance

    return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
