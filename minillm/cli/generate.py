"""``minillm generate``: prompts in, completions out, in the order of the prompts."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.cli.answers import Writer, as_json
from minillm.cli.options import beam_options, engine_options, sampling_options
from minillm.cli.prompt_file import Request, read_requests
from minillm.errors import MinillmError, UsageError
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.progress import GenerationBar, loading_bar, say
from minillm.system import import_torch
from minillm.text.safe import clean
from minillm.user_config import UserConfig, read_config

if TYPE_CHECKING:
    from minillm.llm import LLM


@dataclass(frozen=True)
class Job:
    """The command line, read once.

    Attributes:
        given: parameters that the command line names; each request may name others.
        output: the file for the answers; None: standard output.
    """

    model: str
    engine: Mapping[str, Any]
    config: UserConfig
    given: Mapping[str, Any]
    requests: list[Request]
    chat: bool
    system: str | None
    parse_special: bool
    as_json: bool
    quiet: bool
    output: Path | None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Job:
        """Read the configuration and the prompts. Raises UsageError."""
        config = read_config(arguments.config)
        engine = {**config.engine, **engine_options(arguments)}
        _check_replicas(arguments, int(engine.get("tensor_parallel_size", 1)))
        if arguments.parse_special and (arguments.chat or arguments.system):
            raise UsageError("--parse-special is for raw prompts; in a chat only the template makes control tokens")
        return cls(
            config.choose_model(arguments.model),
            engine,
            config,
            {**sampling_options(arguments), **beam_options(arguments)},
            read_requests(arguments.prompts, arguments.file, arguments.form),
            chat=bool(arguments.chat or arguments.system),
            system=arguments.system,
            parse_special=arguments.parse_special,
            as_json=arguments.json,
            quiet=arguments.quiet,
            output=Path(arguments.output) if arguments.output else None,
        )

    def params(self, defaults: Mapping[str, Any] = {}) -> list[Params]:
        """The parameters of each request; ``defaults`` are the model's own. Raises UsageError."""
        found: list[Params] = []
        for request in self.requests:
            values = self.config.request_values({**self.given, **request.params}, defaults)
            try:
                found.append((BeamSearchParams if "beam_width" in values else SamplingParams)(**values))
            except UsageError as error:
                raise UsageError(f"{request.where}: {error}") from None
        return found

    def name(self) -> str:
        """What tells these answers from those to other requests, in 16 hexadecimal digits."""
        about = [self.model, self.chat, self.system, self.parse_special, self.requests, self.params()]
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def prompt(self, request: Request, llm: LLM) -> str | list[int]:
        """Text or token ids; the ids of a conversation, by the model's template."""
        messages = request.messages
        if messages is None and self.chat:
            if not isinstance(request.prompt, str):
                raise UsageError(f"{request.where}: --chat needs text, not token ids")
            messages = [{"role": "user", "content": request.prompt}]
        if messages is not None and self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        if messages is not None:
            return llm.tokenizer.apply_chat_template(messages)
        assert request.prompt is not None
        return llm.token_ids(request.prompt, parse_special=True) if self.parse_special else request.prompt


def run(arguments: argparse.Namespace) -> int:
    job = Job.of(arguments)
    job.params()  # everything that can be wrong with the requests is said before the model is loaded
    if job.output is not None and not arguments.force:
        from minillm.parallel.shared_work import PartFiles

        failed = PartFiles(job.output, job.name()).failures(len(job.requests))
        if failed is not None:
            say(f"{job.output} is finished: {_prompts(len(job.requests))}, {failed} failed; --force computes all again")
            return 1 if failed else 0
    import_torch()
    from minillm.llm import LLM

    with loading_bar(enabled=not job.quiet) as report:
        llm = LLM(job.model, on_progress=report, on_message=say, **job.engine)
    params = job.params(llm.engine.defaults)
    return _to_stdout(job, llm, params) if job.output is None else _to_file(job, llm, params, job.output)


def _check_replicas(arguments: argparse.Namespace, tensor_parallel_size: int) -> None:
    """Raise UsageError where several replicas would do the same work, or have nowhere to put it."""
    from minillm.parallel.launch import Torchrun

    torchrun = Torchrun.from_environment()
    count = 1 if torchrun is None else torchrun.num_replicas(max(1, tensor_parallel_size))
    if arguments.data_parallel and torchrun is None:
        raise UsageError("--data-parallel: torchrun starts the replicas (torchrun --nproc-per-node 4 -m minillm …)")
    if arguments.data_parallel and not (arguments.output and arguments.file not in (None, "-")):
        raise UsageError("--data-parallel needs the prompts in a --file and an --output, which all replicas can reach")
    if count > 1 and not arguments.data_parallel:
        raise UsageError(
            f"torchrun has started {count} replicas, and each would complete every prompt; "
            "say --data-parallel to share them, or raise --tensor-parallel-size"
        )


def _to_stdout(job: Job, llm: LLM, params: list[Params]) -> int:
    prompts = [job.prompt(request, llm) for request in job.requests]
    if len(prompts) == 1 and not job.as_json and isinstance(params[0], SamplingParams) and params[0].n == 1:
        for delta in llm.stream(prompts[0], params[0]):
            print(clean(delta.text), end="", flush=True)
        print()
        return 0
    failed = 0
    with GenerationBar(len(prompts), enabled=not job.quiet) as bar:
        several = len(prompts) > 1 or params[0].num_sequences > 1
        writer = Writer(bar.print, job.requests, llm.engine.tokenizer, with_json=job.as_json, several=several)
        try:
            for index, output in llm.as_completed(prompts, params):
                failed += output.error is not None
                writer.add(index, output)
                bar.advance(_num_tokens(output))
        except KeyboardInterrupt:
            writer.flush()
            say(f"stopped; {writer.written} of {_prompts(len(prompts))} are finished")
            return 130
    return _tell_failures(failed, len(prompts))


def _to_file(job: Job, llm: LLM, params: list[Params], path: Path) -> int:
    """Answers to a file, by one replica or several; what is finished is never computed again."""
    from torch.distributed import DistError

    from minillm.parallel.channel import RankDied

    kept = f"what is finished is kept beside {path}: the same command goes on from there"
    try:
        return _share(job, llm, params, path)
    except KeyboardInterrupt:
        say(f"stopped; {kept}")
        return 130
    except RankDied as error:
        raise MinillmError(f"{error}; {kept}") from None
    except DistError:  # torchrun's store, which the first node has
        raise MinillmError(f"the first node is gone; {kept}") from None


def _share(job: Job, llm: LLM, params: list[Params], path: Path) -> int:
    """This replica's part of the requests; the first replica merges all parts."""
    from minillm.parallel.shared_work import PartFiles, Replicas, SharedQueue

    replicas, parts, total = Replicas.find(llm.config.tensor_parallel_size), PartFiles(path, job.name()), len(params)
    left = replicas.agreed("left", lambda: sorted(set(range(total)) - set(parts.finished())))
    parts.open(replicas.index)
    queue = SharedQueue(replicas, len(left))

    def take(room: int) -> list[tuple[int, Any, Params]]:
        return [(i, job.prompt(job.requests[i], llm), params[i]) for i in (left[n] for n in queue.take(room))]

    replicas.meet("ready")
    began, count = time.monotonic(), 0
    with GenerationBar(len(left), enabled=not job.quiet and replicas.count == 1) as bar:
        for index, output in llm.work_off(take):
            parts.add(as_json(index, job.requests[index], output, llm.engine.tokenizer))
            count += _num_tokens(output)
            bar.advance(_num_tokens(output))
    replicas.store.add("tokens", count)
    replicas.arrive("done")
    if replicas.index:
        return 0
    replicas.wait_for_all("done")
    seconds = time.monotonic() - began
    failed = parts.merge(total)
    count = replicas.store.add("tokens", 0)
    by = f" by {replicas.count} replicas" if replicas.count > 1 else ""
    say(
        f"{_prompts(len(left))} ({total - len(left)} were finished before), {count:,} tokens in {seconds:.1f} s{by}: "
        f"{count / max(seconds, 1e-9):,.0f} tokens a second"
    )
    return _tell_failures(failed, total)


def _tell_failures(failed: int, total: int) -> int:
    """Say how many requests failed; returns the exit code."""
    if failed:
        say(f"{failed} of {_prompts(total)} failed")
    return 1 if failed else 0


def _prompts(count: int) -> str:
    return f"{count:,} prompt{'' if count == 1 else 's'}"


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)
