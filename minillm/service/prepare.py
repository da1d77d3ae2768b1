"""Convert a request from the HTTP process to token ids and parameters.

This runs outside the engine thread, so that a chat template or a long text does not delay a step.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from minillm.engine.engine import Engine
from minillm.engine.prompts import token_ids_of, tokenizer_of
from minillm.errors import UsageError
from minillm.grammar.grammar import MAX_BYTES, Grammar
from minillm.grammar.notation import WHITE_SPACE, followed
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.service.call_messages import Complete, Conversation, Token
from minillm.text.chat_template import plain_messages
from minillm.text.reasoning import CLOSE, is_opened, is_unfinished
from minillm.text.tokenizer import Tokenizer

_NO_THOUGHTS = f"\n\n{CLOSE}\n\n"


@dataclass(frozen=True)
class Prepared:
    """A request that is ready for the engine.

    For a fork, ``token_ids`` are the tokens after the fork point.
    """

    call: Complete
    token_ids: list[int]
    params: Params
    in_reasoning: bool  # the prompt ends inside the reasoning
    continuation: list[int] | None = None  # used instead of ``token_ids`` if the tokens before the fork end in text


def prepare(engine: Engine, call: Complete) -> Prepared:
    """Convert a request to token ids and parameters. Raises MinillmError if the request is invalid."""
    params = _params(call)
    engine.requests.grammars.matcher(params)  # compile the grammar now, so that the engine thread need not
    token_ids = [] if call.prompt is None else prompt_ids(engine, call.prompt, call.tenant, special=call.fork is None)
    continuation = None
    if isinstance(call.prompt, str) and call.fork is not None:
        continuation = tokenizer_of(engine).encode(call.prompt, add_special_tokens=False, continues=True)
    opened = False
    if isinstance(call.prompt, Conversation):
        token_ids, opened = with_thoughts(engine, token_ids, call.prompt, is_bare=call.is_bare)
    return Prepared(call, token_ids, params, opened, continuation)


def with_thoughts(
    engine: Engine, token_ids: list[int], conversation: Conversation, *, is_bare: bool
) -> tuple[list[int], bool]:
    """Return a conversation's token ids, and whether they end inside the reasoning.

    ``is_bare``: the answer must not contain reasoning. If the conversation ends inside the reasoning, for example
    because the chat template ends with an opening tag, the tokens of a closing tag are appended.
    """
    opened = is_opened(tokenizer_of(engine).decode, token_ids)
    if conversation.continue_final_message:
        opened = opened or is_unfinished(plain_messages(conversation.messages[-1:])[0]["content"])
    if opened and is_bare:
        return token_ids + token_ids_of(engine, _NO_THOUGHTS, parse_special=True, after=token_ids), False
    return token_ids, opened


def _params(call: Complete) -> Params:
    """Return the parameters of a request. Raises UsageError if they are invalid.

    If the schema of a tool's arguments is invalid, the error names the tool. It does not quote the grammar for tool
    calls, because no client wrote it.
    """
    values = call.params
    if call.schemas:
        values = {**values, "grammar": {"lark": with_arguments(values["grammar"]["lark"], call.schemas)}}
    try:
        return (BeamSearchParams if "beam_width" in values else SamplingParams)(**values)
    except UsageError as error:
        if not call.schemas or not str(error).startswith("grammar: "):
            raise
    for name, schema in call.schemas.items():
        with _naming(name):
            Grammar.json(schema)
    why = "the schemas of all tools take too much memory or time to compile; give fewer tools or simpler schemas"
    raise UsageError(f"grammar: {why}")


def with_arguments(lark: str, schemas: Mapping[str, Any]) -> str:
    """Return the Lark grammar ``lark`` with an additional rule for the arguments of each tool.

    The rules are called ``arguments_0``, ``arguments_1`` and so on, in the order of ``schemas``. ``schemas`` maps tool
    names to JSON schemas.
    """
    lines = [lark]
    for number, (name, schema) in enumerate(schemas.items()):
        with _naming(name):
            if len(json.dumps(schema)) > MAX_BYTES:
                raise UsageError(f"the JSON schema has more than {MAX_BYTES:,} bytes; make it smaller")
            spaced = {**followed(schema), "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        lines.append(f"arguments_{number}: %json {json.dumps(spaced)}")
    return "\n".join(lines)


@contextmanager
def _naming(tool: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"grammar: {tool}: {str(error).removeprefix('grammar: ')}") from None


def prompt_ids(
    engine: Engine, prompt: str | list[int] | Conversation, tenant: str, *, special: bool = True
) -> list[int]:
    """Return the token ids of a tenant's prompt.

    ``special``: if the prompt is text, add the special tokens that begin a text, such as BOS.
    """
    if isinstance(prompt, Conversation):
        if known := prompt.known_ids:
            if known[-1] in engine.requests.eos_token_ids:  # the template ends the answer itself
                known = known[:-1]
            with suppress(UsageError):  # for example a template that shows results of tools only after calls
                return known + _chat_ids(engine, prompt, tenant, prompt.num_known)
        return _chat_ids(engine, prompt, tenant)
    if isinstance(prompt, str):
        if not engine.requests.tokenizer:
            raise UsageError("this model has no tokenizer; give token ids instead of text")
        return token_ids_of(engine, prompt, add_special_tokens=special)
    return prompt


def _chat_ids(engine: Engine, prompt: Conversation, tenant: str, num_known: int = 0) -> list[int]:
    return tokenizer_of(engine).apply_chat_template(
        prompt.messages,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        tools=prompt.tools,
        thinks=prompt.template_options.get("enable_thinking"),
        num_known=num_known,
        owner=tenant,
        max_tokens=engine.max_model_len,
    )


def token_of(
    tokenizer: Tokenizer | None, token_id: int, logprob: float | None, top: list[tuple[int, float]], rank: int = 0
) -> Token:
    """Return a token with its text and bytes, for the HTTP process.

    ``top``: (token id, log-probability) of the most probable tokens at its position.
    """
    if tokenizer is None:
        return Token(token_id, str(token_id), b"", logprob, [(str(other), b"", value) for other, value in top], rank)
    text, raw = tokenizer.token_text, tokenizer.token_bytes
    best = [(text(i), raw(i), value) for i, value in top]
    return Token(token_id, text(token_id), raw(token_id), logprob, best, rank)
