"""``minillm generate``: prompts in, completions out, in the order of the prompts."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from minillm.cli.options import beam_options, engine_options, sampling_options
from minillm.cli.streams import takes_utf8
from minillm.errors import MinillmError, UsageError
from minillm.interrupt import import_torch
from minillm.paths import expanded
from minillm.progress import GenerationBar, loading_bar, say
from minillm.text.safe import clean, json_line, parse_json

MAX_INPUT_BYTES = 256 << 20


@dataclass(frozen=True)
class Request:
    """One line of work: a prompt or a conversation, and the parameters that differ from the command line's."""

    prompt: str | list[int] | None
    messages: list[dict[str, str]] | None
    params: dict[str, Any]
    name: str | None  # the caller's id for it
    where: str  # for error messages


def run(arguments: argparse.Namespace) -> int:
    _check_output(arguments)
    requests = _read_requests(arguments)
    # Everything that can be wrong with the request is said before the model is loaded.
    from minillm.params import BeamSearchParams, Params, SamplingParams

    base = {**sampling_options(arguments), **beam_options(arguments)}
    all_params: list[Params] = []
    for request in requests:
        values = {**base, **request.params}
        try:
            kind = BeamSearchParams if "beam_width" in values else SamplingParams
            all_params.append(kind.from_mapping(values))
        except UsageError as error:
            raise UsageError(f"{request.where}: {error}" if request.where else str(error)) from None

    import_torch()
    from minillm.llm import LLM
    from minillm.weights.manifest import default_model

    with loading_bar(enabled=not arguments.quiet) as report:
        llm = LLM(arguments.model or default_model(), on_progress=report, on_message=say, **engine_options(arguments))
    if arguments.output:
        return _run_to_file(arguments, llm, requests, all_params)
    prompts = [_prompt_of(request, arguments, llm) for request in requests]
    if len(requests) == 1 and not arguments.json and all_params[0].num_sequences == 1:
        return _stream(llm, prompts[0], all_params[0])
    failed = 0
    with GenerationBar(len(requests), enabled=not arguments.quiet) as bar:
        several = all_params[0].num_sequences > 1 or len(requests) > 1
        writer = _Writer(bar.print, requests, as_json=arguments.json, several=several)
        try:
            for index, output in llm.as_completed(prompts, all_params):
                failed += output.error is not None
                writer.add(index, output)
                bar.advance(sum(len(completion.token_ids) for completion in output.outputs))
        except KeyboardInterrupt:
            writer.flush()
            say(f"stopped; {writer.written} of {len(requests)} prompts are finished")
            return 130
    if failed:
        say(f"{failed} of {len(requests)} prompts failed")
    return 1 if failed else 0


def _prompt_of(request: Request, arguments: argparse.Namespace, llm: Any) -> Any:
    """Text or token ids; of a conversation, the text of the model's template."""
    messages = request.messages
    if messages is None and (arguments.chat or arguments.system):
        if not isinstance(request.prompt, str):
            raise UsageError(f"{request.where}: --chat needs text, not token ids")
        messages = [{"role": "user", "content": request.prompt}]
    if messages is not None and arguments.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": arguments.system}, *messages]
    return request.prompt if messages is None else llm.tokenizer.apply_chat_template(messages)


def _check_output(arguments: argparse.Namespace) -> None:
    """Raise UsageError where several replicas would do the same work, or have nowhere to put it."""
    from minillm.parallel.launch import Torchrun
    from minillm.parallel.shared_work import PartFiles

    if arguments.output:
        PartFiles.check(expanded(arguments.output, "--output"))
    torchrun = Torchrun.from_environment()
    count = 1 if torchrun is None else torchrun.num_replicas(max(1, arguments.tensor_parallel_size or 1))
    if arguments.data_parallel and torchrun is None:
        raise UsageError("--data-parallel: torchrun starts the replicas (torchrun --nproc-per-node 4 -m minillm …)")
    if arguments.data_parallel and not (arguments.output and arguments.file not in (None, "-")):
        raise UsageError("--data-parallel needs the prompts in a --file and an --output, which all replicas can reach")
    if count > 1 and not arguments.data_parallel:
        raise UsageError(
            f"torchrun has started {count} replicas, and each would complete every prompt; "
            "say --data-parallel to share them, or raise --tensor-parallel-size"
        )


def _run_to_file(arguments: argparse.Namespace, llm: Any, requests: list[Request], all_params: list[Any]) -> int:
    """Answers to a file, by one replica or several; what is finished is never computed again."""
    from torch.distributed import DistError

    from minillm.parallel.channel import RankDied

    kept = f"what is finished is kept beside {arguments.output}: the same command goes on from there"
    try:
        return _share(arguments, llm, requests, all_params)
    except KeyboardInterrupt:
        say(f"stopped; {kept}")
        return 130
    except RankDied as error:
        raise MinillmError(f"{error}; {kept}") from None
    except OSError as error:
        raise MinillmError(f"cannot write {error.filename or arguments.output}: {error.strerror}; {kept}") from None
    except DistError:  # torchrun's store, which the first node has
        raise MinillmError(f"the first node is gone; {kept}") from None


def _share(arguments: argparse.Namespace, llm: Any, requests: list[Request], all_params: list[Any]) -> int:
    """This replica's part of the requests; the first replica merges all parts."""
    from minillm.parallel.shared_work import PartFiles, Replicas, SharedQueue

    replicas = Replicas.find(llm.config.tensor_parallel_size)
    parts = PartFiles(expanded(arguments.output, "--output"), _job_of(arguments, requests, all_params))
    total = len(requests)
    left = replicas.agreed("left", lambda: sorted(set(range(total)) - set(parts.finished())))
    parts.open(replicas.index)
    queue = SharedQueue(replicas, len(left))

    def take(room: int) -> list[tuple[int, Any, Any]]:
        return [
            (i, _prompt_of(requests[i], arguments, llm), all_params[i]) for i in (left[n] for n in queue.take(room))
        ]

    replicas.meet("ready")
    began, count = time.monotonic(), 0
    with GenerationBar(len(left), enabled=not arguments.quiet and replicas.count == 1) as bar:
        for index, output in llm.work_off(take):
            parts.add(_as_json(index, requests[index], output))
            num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
            count += num_tokens
            bar.advance(num_tokens)
    replicas.store.add("tokens", count)
    replicas.arrive("done")
    if replicas.index:
        return 0
    replicas.wait_for_all("done")
    seconds = time.monotonic() - began
    failed = parts.merge(total)
    count = replicas.store.add("tokens", 0)
    say(
        f"{len(left)} prompts ({total - len(left)} were finished before), {count:,} tokens in {seconds:.1f} s by "
        f"{replicas.count} replicas: {count / max(seconds, 1e-9):,.0f} tokens a second"
    )
    if failed:
        say(f"{failed} of {total} prompts failed")
    return 1 if failed else 0


def _job_of(arguments: argparse.Namespace, requests: list[Request], all_params: list[Any]) -> str:
    """What tells these requests from others."""
    about = [arguments.model, arguments.chat, arguments.system, *zip(requests, all_params, strict=True)]
    return hashlib.sha256(repr(about).encode()).hexdigest()


def _stream(llm: Any, prompt: Any, params: Any) -> int:
    """One completion, as it comes."""
    for delta in llm.stream(prompt, params):
        print(clean(delta.text), end="", flush=True)
    print()
    return 0


class _Writer:
    """Writes outputs in the order of their prompts, each as soon as those before it are written."""

    def __init__(
        self, write_line: Callable[[str], None], requests: list[Request], *, as_json: bool, several: bool
    ) -> None:
        self._write_line = write_line
        self._requests = requests
        self._as_json = as_json
        self._several = several
        self._waiting: dict[int, Any] = {}
        self._next = 0
        self.written = 0

    def add(self, index: int, output: Any) -> None:
        self._waiting[index] = output
        while self._next in self._waiting:
            self._write(self._next, self._waiting.pop(self._next))
            self._next += 1

    def flush(self) -> None:
        """Write what is finished although something before it is not."""
        for index in sorted(self._waiting):
            self._write(index, self._waiting.pop(index))

    def _write(self, index: int, output: Any) -> None:
        self.written += output.error is None
        request = self._requests[index]
        if self._as_json:
            line = json_line(_as_json(index, request, output), ascii_only=not takes_utf8(sys.stdout))
            self._write_line(line)
            return
        if output.error is not None:
            say(f"{request.where or 'prompt'}: {output.error}")
        for completion in output.outputs:
            if self._several:
                number = f"{index + 1}.{completion.index + 1}" if len(output.outputs) > 1 else str(index + 1)
                self._write_line(f"--- {number} ---")
            self._write_line(clean(completion.text))


def _as_json(index: int, request: Request, output: Any) -> dict[str, Any]:
    """The fields of RequestOutput, with durations in place of clock readings."""
    result = asdict(output)
    result["index"] = index
    result["request_id"] = f"request-{index}" if request.name is None else request.name
    metrics = result.pop("metrics")
    if metrics is not None and metrics["finished_time"] is not None:
        began = metrics["arrival_time"]
        result["metrics"] = {
            "time_to_first_token": metrics["first_token_time"] and metrics["first_token_time"] - began,
            "time": metrics["finished_time"] - began,
            "num_preemptions": metrics["num_preemptions"],
        }
    return result


# --- input ------------------------------------------------------------------------------------------------------------


def _read_requests(arguments: argparse.Namespace) -> list[Request]:
    if arguments.prompts and arguments.file:
        raise UsageError("give prompts either as arguments or with --file, not both")
    if arguments.prompts:
        return [_text_request(text, f"prompt {i + 1}") for i, text in enumerate(arguments.prompts)]
    source = arguments.file or "-"
    asked = arguments.file is None and sys.stdin.isatty()
    text = "" if asked else _read(source)
    if arguments.file is None and not text.strip():
        why = "no prompt" if asked else "no prompt, standard input is empty"
        raise UsageError(f'{why}: give one as an argument (minillm generate "Once upon a time"), or --file FILE')
    name = "standard input" if source == "-" else source
    if arguments.jsonl or (source.endswith(".jsonl") and not arguments.lines):
        requests = list(_jsonl_requests(_lines(text), name))
    elif arguments.lines:
        lines = enumerate(_lines(text), 1)
        requests = [_text_request(line, f"{name}:{number}") for number, line in lines if line.strip()]
    else:
        requests = [_text_request(text.removesuffix("\n"), name)]
    if not requests:
        raise UsageError(f"{name} holds no prompt")
    return requests


def _read(source: str) -> str:
    try:
        number = 0 if source == "-" else os.open(source, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer is empty
        os.set_blocking(number, True)
        with open(number, "rb") as stream:
            data = stream.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from None
    if len(data) > MAX_INPUT_BYTES:
        raise UsageError(f"{source} is larger than {MAX_INPUT_BYTES >> 20} MB; split it")
    return data.decode("utf-8-sig", errors="replace")


def _lines(text: str) -> list[str]:
    """Lines as files have them; `str.splitlines` would break a text, and JSON, at U+2028, U+0085 and their like too."""
    return text.replace("\r\n", "\n").split("\n")


def _text_request(text: str, where: str) -> Request:
    if not text.strip():
        raise UsageError(f"{where} is empty")
    return Request(text, None, {}, None, where)


def _jsonl_requests(lines: Iterable[str], name: str) -> Iterator[Request]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            value = parse_json(line)
        except ValueError as error:
            raise UsageError(f"{where}: not JSON: {error}") from None
        if not isinstance(value, Mapping):
            raise UsageError(f'{where}: a request is an object such as {{"prompt": "…"}}, not {line.strip()[:40]!r}')
        yield _json_request(dict(value), where)


def _json_request(value: dict[str, Any], where: str) -> Request:
    """``{"prompt": text or ids}`` or ``{"messages": […]}``, an optional "id", and sampling parameters by name."""
    prompt, messages = value.pop("prompt", None), value.pop("messages", None)
    name = value.pop("id", None)
    if (prompt is None) == (messages is None):
        raise UsageError(f'{where}: give either "prompt" or "messages"')
    if messages is not None:
        ok = isinstance(messages, list) and messages
        if not ok or not all(
            isinstance(m, dict) and set(m) == {"role", "content"} and all(isinstance(v, str) for v in m.values())
            for m in messages
        ):
            raise UsageError(f'{where}: "messages" is a list of {{"role": "user", "content": "…"}}')
    elif isinstance(prompt, str):
        if not prompt.strip():
            raise UsageError(f"{where}: the prompt is empty")
    elif not (isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)):
        raise UsageError(f'{where}: "prompt" is text or a list of token ids')
    return Request(prompt, messages, value, None if name is None else str(name), where)
