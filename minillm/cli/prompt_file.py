"""Read the prompts of ``minillm generate`` from the command line, a file or standard input."""

import json
import os
import select
import stat
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from minillm.checks import check_names
from minillm.errors import UsageError
from minillm.jobs.rows import InputRow
from minillm.params import BeamSearchParams, SamplingParams
from minillm.progress import say
from minillm.text.chat_template import plain_messages
from minillm.text.safe import parse_json

_MAX_BYTES = 256 << 20
_PATIENCE = 10.0  # seconds to wait for piped text; with ``--file -`` there is no limit


def read_requests(prompts: Sequence[str], file: str | None, form: str | None) -> list[InputRow]:
    """Return all requests, in order. Their parameters override the command line's.

    Raises UsageError if there are none, or if a request is invalid. The message names the invalid request's line.

    Args:
        prompts: the prompts on the command line. Piped text is appended to each, after a blank line.
        file: a path, or "-" for standard input, which is read without a time limit.
        form: "lines": every line of the file is a prompt; "jsonl": every line is a JSON object; None: the whole file is
            one prompt, unless its name ends in ``.jsonl``.
    """
    if file == "":
        raise UsageError("--file is empty: give a file's name, or - for standard input")
    if prompts:
        if file not in (None, "-"):
            raise UsageError("give prompts either as arguments or with --file, not both")
        tail = _tail(_read("-") if file == "-" or _is_piped() else "")
        return [_text_request(i, text, f"prompt {i + 1}", tail) for i, text in enumerate(prompts)]
    source = file or "-"
    name = "standard input" if source == "-" else source
    form = form or ("jsonl" if source.endswith(".jsonl") else None)
    asked = file is None and os.isatty(0)
    text = "" if asked else _read(source, name if form else None)
    if file is None and not text.strip():
        why = "no prompt" if asked else "no prompt, standard input is empty"
        ways = 'give one in quotation marks, such as "Once upon a time"; `minillm generate` also takes --file FILE'
        raise UsageError(f"{why}: {ways}")
    split = text.replace("\r\n", "\n").split("\n")  # `str.splitlines` also splits text and JSON at U+2028
    lines = [(f"{name}:{number}", line) for number, line in enumerate(split, 1) if line.strip()]
    if form == "jsonl":
        requests = [_json_request(index, line, where) for index, (where, line) in enumerate(lines)]
    elif form == "lines":
        requests = [_text_request(index, line, where) for index, (where, line) in enumerate(lines)]
    else:
        requests = [_text_request(0, text.removesuffix("\n"), name)]
    if not requests:
        raise UsageError(f"{name} holds no prompt")
    return requests


def with_piped_text(question: str) -> str:
    """Return ``question``, followed by a blank line and the piped text if there is any."""
    return question + _tail(_read("-") if _is_piped() else "")


def _tail(piped: str) -> str:
    return f"\n\n{piped.rstrip()}" if piped.strip() else ""


def _is_piped() -> bool:
    """Return whether standard input has text to append to the prompts of the command line.

    The result is True for a file, and for a pipe that delivers something within `_PATIENCE` seconds. The limit is for
    inherited pipes, which may never deliver anything. For a partly read file, the result is False: a shell loop is
    probably reading the file, such as ``while read line; do minillm generate "$line"; done``.
    """
    try:
        mode = os.fstat(0).st_mode
        if stat.S_ISREG(mode):
            return os.lseek(0, 0, os.SEEK_CUR) == 0
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return False
        if select.select([0], [], [], _PATIENCE)[0]:
            return True
    except OSError:
        return False
    say(f"nothing came through standard input in {_PATIENCE:g} seconds: going on without it (--file - waits)")
    return False


def _read(source: str, name: str | None = None) -> str:
    """Read a file, or standard input ("-"). Raises UsageError if that fails, or if the file is too large.

    ``name``: the file consists of lines. If one is not UTF-8, raise UsageError with this name and the line's number,
    because a prompt would have other characters. Otherwise, replace what is not UTF-8 by U+FFFD.
    """
    try:
        number = (
            0 if source == "-" else os.open(source, os.O_RDONLY | os.O_NONBLOCK)
        )  # with O_NONBLOCK, a named pipe that nobody writes to reads as empty
        os.set_blocking(number, True)
        with open(number, "rb", closefd=number != 0) as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{source} is larger than {_MAX_BYTES >> 20} MB; split it")
    try:
        return data.decode("utf-8-sig", errors="replace" if name is None else "strict")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}:{number} is not UTF-8 text; convert the file, for example with iconv") from None


def _text_request(index: int, text: str, where: str, tail: str = "") -> InputRow:
    if not text.strip():
        raise UsageError(f"{where} is empty")
    return InputRow(index, text + tail, where=where)


def _check_keys(params: Mapping[str, Any], where: str) -> None:
    """Raise UsageError if a key of ``params`` is not a sampling parameter. The message begins with ``where``."""
    known = {each.name for cls in (SamplingParams, BeamSearchParams) for each in fields(cls)}
    try:
        check_names(params, ["prompt", "messages", "id", *known], "key")
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _json_request(index: int, line: str, where: str) -> InputRow:
    """Parse ``{"prompt": text or ids}`` or ``{"messages": […]}``, with an optional "id" and sampling parameters.

    Raises UsageError if the line is invalid. The message begins with ``where``.
    """
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise UsageError(f'{where}: a request is an object such as {{"prompt": "…"}}, not {line.strip()[:40]!r}')
    params = dict(value)
    prompt, messages, name = (params.pop(key, None) for key in ("prompt", "messages", "id"))
    if (prompt is None) == (messages is None):
        if prompt is None:
            _check_keys(params, where)  # if a key is misspelled, report that
        raise UsageError(f'{where}: give either "prompt" or "messages"')
    if messages is not None:
        try:
            messages = plain_messages(messages)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
    elif isinstance(prompt, str):
        if not prompt.strip():
            raise UsageError(f"{where}: the prompt is empty")
    elif not (isinstance(prompt, list) and all(type(each) is int for each in prompt)):
        raise UsageError(f'{where}: "prompt" is text or a list of token ids')
    if name is not None and not isinstance(name, str):
        name = json.dumps(name)
    return InputRow(index, prompt, messages, params, name, where)
