"""Turn the prompts of an engine's requests into token ids."""

from collections.abc import Sequence

from minillm.engine.engine import Engine
from minillm.errors import UsageError
from minillm.text.prompts import Prompt, plain_ids
from minillm.text.tokenizer import Tokenizer


def tokenizer_of(engine: Engine) -> Tokenizer:
    """Return the model's tokenizer; raise UsageError if it has none."""
    if engine.tokenizer is None:
        why = "this model has no tokenizer (no tokenizer.json, or random weights)"
        raise UsageError(f"{why}; give token ids instead of text")
    return engine.tokenizer


def token_ids_of(
    engine: Engine,
    prompt: Prompt,
    *,
    add_special_tokens: bool = True,
    parse_special: bool = False,
    whole: bool = True,
    after: Sequence[int] | None = None,
) -> list[int]:
    """Return a prompt's ids (see `minillm.llm.LLM.token_ids`).

    Raise UsageError for text if the model has no tokenizer.

    Args:
        whole: reject text that is too long for the context.
        after: ids of the text that ``prompt`` continues. If given, no special tokens are added.
    """
    if not isinstance(prompt, str):
        return plain_ids(prompt)
    tokenizer = tokenizer_of(engine)
    tokenizer.check_length(prompt, engine.max_model_len if whole else None)
    return tokenizer.encode(
        prompt,
        add_special_tokens=add_special_tokens and after is None,
        parse_special=parse_special,
        continues=after is not None and tokenizer.ends_in_text(after),
    )
