"""Rows of work: prompts with their parameters, and their answers as JSON objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from minillm.errors import UsageError
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams

if TYPE_CHECKING:
    from minillm.llm import LLM
    from minillm.text.prompts import Prompt
    from minillm.text.tokenizer import Tokenizer

Answer = dict[str, Any]
_ONLY_SAMPLING = {each.name for each in fields(SamplingParams)} - {each.name for each in fields(BeamSearchParams)}


@dataclass(frozen=True)
class InputRow:
    """One prompt or conversation.

    Attributes:
        index: the row's position among all rows.
        prompt: text or token ids; None if there are ``messages``.
        messages: a conversation in OpenAI's format; None if there is a ``prompt``.
        params: fields of SamplingParams, or of BeamSearchParams if ``beam_width`` is one of them.
        name: the caller's id for the row.
        where: the row's place in the input (file and line), for error messages.
    """

    index: int
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    where: str = ""

    def sampling(self) -> Params:
        """Validate and return the row's parameters. Raises UsageError."""
        try:
            if "beam_width" not in self.params:
                return SamplingParams(**self.params)
            if wrong := [name for name in self.params if name in _ONLY_SAMPLING]:
                raise UsageError(f"{wrong[0]} is for sampling, but this is a beam search; leave it out")
            return BeamSearchParams(**self.params)
        except UsageError as error:
            raise UsageError(f"{self.where}: {error}" if self.where else str(error)) from None


@dataclass(frozen=True)
class Style:
    """Options for turning a row's text into a prompt.

    Attributes:
        chat: wrap each text as a user's message.
        system: the system prompt; implies ``chat``.
        parse_special: parse the spellings of control tokens in a raw prompt, such as ``<|im_end|>``, as these tokens.
    """

    chat: bool = False
    system: str | None = None
    parse_special: bool = False

    def request(self, row: InputRow, llm: LLM) -> tuple[Prompt, Params]:
        """Return a row's prompt and parameters. The model's chat template turns a conversation into token ids.

        Raises UsageError for a wrong row.
        """
        return self._prompt(row, llm), row.sampling()

    def _prompt(self, row: InputRow, llm: LLM) -> str | list[int]:
        messages = row.messages
        if messages is None and (self.chat or self.system):
            if not isinstance(row.prompt, str):
                raise UsageError(f"{row.where}: --chat needs text, not token ids")
            messages = [{"role": "user", "content": row.prompt}]
        if messages is not None and self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        if messages is not None:
            return llm.tokenizer.apply_chat_template(messages)
        assert row.prompt is not None
        return llm.token_ids(row.prompt, parse_special=True) if self.parse_special else row.prompt


def as_json(row: InputRow, output: RequestOutput, tokenizer: Tokenizer | None) -> Answer:
    """Return a row's answer as a JSON object.

    It has the fields of RequestOutput, the row's index and name, and the seed of sampling. Each token that has
    log-probabilities also gets its text. Durations in seconds replace the clock readings of ``metrics``.
    """
    result = asdict(output)
    if "beam_width" not in row.params:
        result["seed"] = row.params.get("seed")
    result["index"] = row.index
    result["request_id"] = f"request-{row.index}" if row.name is None else row.name
    if output.prompt is None and isinstance(row.prompt, str):
        result["prompt"] = row.prompt
    del result["metrics"]
    if (metrics := output.metrics) is not None and metrics.finished_time is not None:
        result["metrics"] = {
            "time_to_first_token": metrics.time_to_first_token,
            "time": metrics.finished_time - metrics.arrival_time,
            "num_preemptions": metrics.num_preemptions,
        }
    if tokenizer is not None:
        tokens = [token for completion in result["outputs"] for token in completion["logprobs"] or ()]
        for token in (*tokens, *(result["prompt_logprobs"] or ())):
            if token is not None:
                token["decoded_token"] = tokenizer.token_text(token["token_id"])
                token["decoded_top"] = [tokenizer.token_text(token_id) for token_id, _ in token["top"]]
    return result


def num_tokens(answer: Answer) -> int:
    """Return the number of tokens generated for a row."""
    return sum(len(completion["token_ids"]) for completion in answer["outputs"])
