"""How ``minillm generate`` writes answers: as text, or as JSON objects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minillm.cli.prompt_file import Request
from minillm.cli.streams import takes_utf8
from minillm.outputs import RequestOutput
from minillm.progress import say
from minillm.text.safe import clean, json_line

if TYPE_CHECKING:
    from minillm.text.tokenizer import Tokenizer


class Writer:
    """Writes outputs in the order of their prompts, each as soon as those before it are written."""

    def __init__(
        self,
        write_line: Callable[[str], None],
        requests: list[Request],
        tokenizer: Tokenizer | None,
        *,
        with_json: bool,
        several: bool,
    ) -> None:
        self._write_line = write_line
        self._requests, self._tokenizer = requests, tokenizer
        self._with_json, self._several = with_json, several
        self._waiting: dict[int, RequestOutput] = {}
        self._next = 0
        self.written = 0

    def add(self, index: int, output: RequestOutput) -> None:
        self._waiting[index] = output
        while self._next in self._waiting:
            self._write(self._next, self._waiting.pop(self._next))
            self._next += 1

    def flush(self) -> None:
        """Write what is finished although something before it is not."""
        for index in sorted(self._waiting):
            self._write(index, self._waiting.pop(index))

    def _write(self, index: int, output: RequestOutput) -> None:
        self.written += output.error is None
        request = self._requests[index]
        if self._with_json:
            line = as_json(index, request, output, self._tokenizer)
            self._write_line(json_line(line, ascii_only=not takes_utf8(sys.stdout)))
            return
        if output.error is not None:
            say(f"{request.where or 'prompt'}: {output.error}")
        for completion in output.outputs:
            if self._several:
                number = f"{index + 1}.{completion.index + 1}" if len(output.outputs) > 1 else str(index + 1)
                score = "" if completion.score is None else f" (score {completion.score:.2f})"
                self._write_line(f"--- {number}{score} ---")
            self._write_line(clean(completion.text))


def as_json(index: int, request: Request, output: RequestOutput, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The fields of RequestOutput, with durations in place of clock readings, and tokens as text beside their ids."""
    result = asdict(output)
    result["index"] = index
    result["request_id"] = f"request-{index}" if request.name is None else request.name
    if output.prompt is None and isinstance(request.prompt, str):
        result["prompt"] = request.prompt
    metrics = result.pop("metrics")
    if metrics is not None and metrics["finished_time"] is not None:
        began = metrics["arrival_time"]
        result["metrics"] = {
            "time_to_first_token": metrics["first_token_time"] and metrics["first_token_time"] - began,
            "time": metrics["finished_time"] - began,
            "num_preemptions": metrics["num_preemptions"],
        }
    if tokenizer is not None:
        for completion in result["outputs"]:
            for token in completion["logprobs"] or ():
                token["decoded_token"] = tokenizer.token_text(token["token_id"])
                token["decoded_top"] = [tokenizer.token_text(token_id) for token_id, _ in token["top"]]
    return result
