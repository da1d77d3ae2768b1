"""``minillm generate``: complete prompts, and write the completions in the prompts' order."""

from __future__ import annotations

import argparse
import codecs
import hashlib
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from minillm.cli.grammars import given_grammar
from minillm.cli.options import given
from minillm.cli.prompt_file import FileRequest, read_requests
from minillm.config import EngineConfig
from minillm.errors import MinillmError, UsageError
from minillm.jobs.rows import Answer, InputRow, Style, as_json, num_tokens
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.progress import GenerationBar, loading_bar, say
from minillm.system import expanded, import_torch
from minillm.text.safe import clean, clean_line, json_line
from minillm.user_config import CALM_SAMPLING, CHAT_SAMPLING, UserConfig, read_config

if TYPE_CHECKING:
    from minillm.jobs.engines import RowEngine
    from minillm.llm import LLM
    from minillm.text.tokenizer import Tokenizer

MOST_ENGINES = 4096


@dataclass(frozen=True)
class GenerateJob:
    """The requests of one `minillm generate` command, with the settings from its options and the configuration file."""

    arguments: argparse.Namespace
    config: UserConfig
    requests: list[FileRequest]
    grammar: Mapping[str, Any] = field(default_factory=dict)  # the parameter ``grammar``, if it is set
    first: int = 0  # with --shard, the number of requests in earlier shards

    @property
    def model(self) -> str:
        return self.config.choose_model(self.arguments.model)

    @property
    def chat(self) -> bool:
        return bool(self.arguments.chat or self.arguments.system)

    @property
    def engine(self) -> dict[str, Any]:
        """Return the engine's options. The command line overrides the configuration file."""
        return {**self.config.engine, **given(self.arguments, EngineConfig)}

    @property
    def style(self) -> Style:
        return Style(self.chat, self.arguments.system, bool(self.arguments.parse_special))

    def rows(self, defaults: Mapping[str, Any] = {}) -> list[InputRow]:
        """Return the requests with their sampling parameters.

        ``defaults`` are the values of parameters that neither the request, the command line nor the configuration sets.
        """
        flags = {**given(self.arguments, SamplingParams), **given(self.arguments, BeamSearchParams), **self.grammar}
        return [
            InputRow(
                self.first + i,
                each.prompt,
                each.messages,
                self.config.request_values({**flags, **each.params}, defaults),
                each.name,
                each.where,
            )
            for i, each in enumerate(self.requests)
        ]

    def params(self) -> list[Params]:
        """Return the sampling parameters of each request, without the model's defaults.

        Raises UsageError if a parameter is invalid.
        """
        return [row.sampling() for row in self.rows()]

    def name(self) -> str:
        """Return a fingerprint of the requests and their settings: 16 hexadecimal digits.

        A stopped run can be resumed only by a command with the fingerprint of the stopped run.
        """
        system, parse_special = self.arguments.system, self.arguments.parse_special
        about = [self.model, self.chat, system, parse_special, self.requests, self.params()]
        if template := EngineConfig(chat_template=self.engine.get("chat_template")).chat_template:
            about.append(template)
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def run(arguments: argparse.Namespace, *, for_chat: bool = False) -> int:
    """Complete the prompts. Return the exit code.

    With ``for_chat``, load the model as the chat does, and use the chat's sampling defaults.
    """
    _check_engines(arguments)
    config = read_config(arguments.config)
    if arguments.parse_special and (arguments.chat or arguments.system):
        raise UsageError("--parse-special is for raw prompts; in a chat, only the template adds control tokens")
    requests = read_requests(arguments.prompts, arguments.file, arguments.form)
    shard = _shard(arguments.shard, len(requests)) if arguments.shard else range(len(requests))
    job = GenerateJob(arguments, config, requests[shard.start : shard.stop], given_grammar(arguments), shard.start)
    _check_torchrun(int(job.engine.get("tensor_parallel_size", 1)))
    job.params()  # report errors in the requests before the model is loaded
    output = _output(arguments) if arguments.output else None
    if output is not None:
        from minillm.jobs.part_files import PartFiles

        PartFiles.check(output)
        failed = None if arguments.force else PartFiles(output, job.name()).failures(len(job.requests))
        if failed is not None:
            say(f"{output} is finished: {_prompts(len(job.requests))}, {failed} failed; --force computes all again")
            return 1 if failed else 0
    with _source(job, for_chat=for_chat) as source:
        defaults = _sampling(source.defaults(), CHAT_SAMPLING if for_chat else CALM_SAMPLING)
        rows = [_with_seed(row) for row in job.rows(defaults)]
        params = [row.sampling() for row in rows]
        if isinstance(source, ThisProcess):
            _suggest_template(job, source.llm, params)
        if output is not None:
            return _to_file(job, source, rows, output)
        assert isinstance(source, ThisProcess)
        return _to_stdout(job, source.llm, rows)


def _sampling(of_model: Mapping[str, Any], ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge the model's own defaults with ``ours``, the defaults of minillm. The model's values win.

    If the model sets any of temperature, top_p, top_k and min_p, temperature and top_p in ``ours`` are left out.
    """
    if {"temperature", "top_p", "top_k", "min_p"} & set(of_model):
        ours = {name: value for name, value in ours.items() if name not in CALM_SAMPLING}
    return {**ours, **of_model}


def _suggest_template(job: GenerateJob, llm: LLM, params: list[Params]) -> None:
    """Print a hint if raw prompts go to a model that has a chat template."""
    from minillm.parallel.launch import Torchrun

    arguments, tokenizer, torchrun = job.arguments, llm.engine.tokenizer, Torchrun.from_environment()
    if job.chat or arguments.parse_special or arguments.quiet or arguments.json or (torchrun and torchrun.rank):
        return
    if tokenizer is None or not tokenizer.has_chat_template:
        return
    if any(isinstance(each.prompt, str) and of.max_tokens for each, of in zip(job.requests, params, strict=True)):
        say("completing the text as it is; this is a chat model, and --chat applies its chat template")


def _with_seed(row: InputRow) -> InputRow:
    """Return ``row``. If it samples and sets no seed, give it a random seed.

    So every run gives other answers. The JSON output contains the seed, so that a run can be repeated.
    """
    if "beam_width" in row.params or row.params.get("seed") is not None:
        return row
    return replace(row, params={**row.params, "seed": secrets.randbits(32)})


def _check_engines(arguments: argparse.Namespace) -> None:
    """Raise UsageError if options about several engines contradict each other or lack a required option."""
    if arguments.data_parallel:
        more = "on several machines, --ray ADDRESS --engines N, or --shard I/N"
        raise UsageError(f"--data-parallel is gone: --replicas N starts N engines on this machine; {more}")
    several = {"--replicas": arguments.replicas, "--ray": arguments.ray, "--shard": arguments.shard}
    for option in [name for name, value in several.items() if value is not None]:
        if not arguments.output:
            raise UsageError(f"{option} needs an --output file for the answers")
    if arguments.replicas is not None and arguments.ray:
        raise UsageError("--replicas starts engines without Ray: say --ray ADDRESS --engines N, or --replicas N")
    if arguments.engines is not None and not arguments.ray:
        raise UsageError("--engines is the number of engines on Ray: say --ray ADDRESS as well, or --replicas N")
    for option, count in (("--replicas", arguments.replicas), ("--engines", arguments.engines)):
        if count is not None and not 1 <= count <= MOST_ENGINES:
            raise UsageError(f"{option} must be from 1 to {MOST_ENGINES}, not {count}")


def _check_torchrun(tensor_parallel_size: int) -> None:
    """Raise UsageError if torchrun has started several engines: every engine would complete every prompt."""
    from minillm.parallel.launch import Torchrun

    torchrun = Torchrun.from_environment()
    if torchrun is not None and (count := torchrun.num_replicas(max(1, tensor_parallel_size))) > 1:
        ways = "start minillm without torchrun and say --replicas, or raise --tensor-parallel-size"
        raise UsageError(f"torchrun has started {count} engines, and each would complete every prompt; {ways}")


def _shard(text: str, total: int) -> range:
    """Return the indices of the requests that belong to the shard ``text``, such as ``0/8`` for the first of eight.

    The indices are consecutive, so that the shards' output files can be concatenated.

    Raises UsageError if ``text`` is not a valid shard of ``total`` requests.
    """
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    index, count = map(int, found.groups()) if found else (1, 0)
    if index >= count:
        raise UsageError(f"--shard is I/N with I from 0 to N - 1, such as 0/8, not {text[:40]!r}")
    if total < count:
        raise UsageError(f"--shard {text}: there are only {_prompts(total)}; use at most {total} shards")
    return range(index * total // count, (index + 1) * total // count)


def _output(arguments: argparse.Namespace) -> Path:
    """Return the path of the output file. Each shard has its own file: ``out.jsonl`` becomes ``out.00-of-16.jsonl``."""
    path = expanded(arguments.output, "--output")
    if arguments.shard is None:
        return path
    index, count = arguments.shard.split("/")
    return path.with_name(f"{path.stem}.{int(index):0{len(str(int(count)))}}-of-{int(count)}{path.suffix}")


class PromptSource(Protocol):
    """Anything that computes answers: the engine of this process, or several engines in other processes."""

    def defaults(self) -> Mapping[str, Any]:
        """Return the model's own sampling parameters."""

    def answers(self, rows: list[InputRow]) -> Iterator[Answer]:
        """Yield the answer of each row, as it finishes."""


@dataclass
class ThisProcess:
    """Compute answers with an engine in this process."""

    llm: LLM
    engine: RowEngine

    def defaults(self) -> Mapping[str, Any]:
        """Return the model's own sampling parameters."""
        return self.llm.engine.defaults

    def answers(self, rows: list[InputRow]) -> Iterator[Answer]:
        """Yield the answer of each row, as it finishes."""
        for row in rows:
            self.engine.submit(row)
        self.engine.close()
        return self.engine.work()


@contextmanager
def _source(job: GenerateJob, *, for_chat: bool) -> Iterator[PromptSource]:
    """Start the engines that the command line asks for. Stop them when the context closes."""
    arguments = job.arguments
    import_torch()
    with ExitStack() as stack:
        report = stack.enter_context(loading_bar(enabled=not arguments.quiet))
        from minillm.jobs.engines import RowEngine, Task

        task = Task(job.model, job.engine, job.style)
        if arguments.ray:
            from minillm.ray import RayEngines

            yield stack.enter_context(RayEngines(task, arguments.engines or 1, arguments.ray))
        elif (arguments.replicas or 1) > 1:
            from minillm.jobs.engine_processes import EngineProcesses

            yield stack.enter_context(EngineProcesses(task, arguments.replicas, report))
        else:
            if for_chat:
                from minillm.cli.chat import load

                llm = load(job.model, job.engine, report)
            else:
                from minillm.llm import LLM

                llm = LLM(job.model, on_progress=report, on_message=say, **job.engine)
            yield ThisProcess(llm, RowEngine(llm, job.style))


@dataclass
class Writer:
    """Writes outputs in the order of their prompts. An output that finishes early waits for the outputs before it."""

    job: GenerateJob
    write_line: Callable[[str], None]
    rows: list[InputRow]
    tokenizer: Tokenizer | None
    several: bool  # there are several texts, so each gets a heading
    written: int = 0  # answers without failures
    _waiting: dict[int, RequestOutput] = field(default_factory=dict)
    _next: int = 0

    def add(self, index: int, output: RequestOutput) -> None:
        self._waiting[index] = output
        while self._next in self._waiting:
            self._write(self._next, self._waiting.pop(self._next))
            self._next += 1

    def flush(self) -> None:
        """Write all waiting outputs, in order. Do not wait for missing outputs before them."""
        for index in sorted(self._waiting):
            self._write(index, self._waiting.pop(index))

    def _write(self, index: int, output: RequestOutput) -> None:
        self.written += output.error is None
        request = self.job.requests[index]
        if self.job.arguments.json:
            in_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
            fields = as_json(self.rows[index], output, self.tokenizer)
            self.write_line(json_line(fields, ascii_only=not in_utf8))
            return
        if output.error is not None:
            say(f"{request.where or 'prompt'}: {output.error}")
        elif output.prompt_logprobs is not None:
            for line in prompt_table(output, self.tokenizer):
                self.write_line(line)
        for completion in output.outputs:
            if self.several:
                number = f"{index + 1}.{completion.index + 1}" if len(output.outputs) > 1 else str(index + 1)
                score = "" if completion.score is None else f" (score {completion.score:.2f})"
                self.write_line(f"--- {number}{score} ---")
            if completion.token_ids or output.prompt_logprobs is None:
                self.write_line(clean(completion.text))


def _to_stdout(job: GenerateJob, llm: LLM, rows: list[InputRow]) -> int:
    prompts, params = zip(*(job.style.request(row, llm) for row in rows), strict=True)
    alone = len(prompts) == 1 and params[0].num_sequences == 1 and isinstance(params[0], SamplingParams)
    if alone and not job.arguments.json and params[0].prompt_logprobs is None:
        for delta in llm.stream(prompts[0], params[0]):
            print(clean(delta.text), end="", flush=True)
        print()
        return 0
    with GenerationBar(len(prompts), enabled=not job.arguments.quiet) as bar:
        several = len(prompts) > 1 or params[0].num_sequences > 1
        writer = Writer(job, bar.print, rows, llm.engine.tokenizer, several)
        try:
            for index, output in llm.as_completed(prompts, params):
                writer.add(index, output)
                bar.advance(sum(len(completion.token_ids) for completion in output.outputs))
        except KeyboardInterrupt:
            writer.flush()
            say(f"stopped; {writer.written} of {_prompts(len(prompts))} are finished")
            return 130
    return _tell_failures(len(prompts) - writer.written, len(prompts))


def _to_file(job: GenerateJob, source: PromptSource, rows: list[InputRow], path: Path) -> int:
    """Compute the answers, and write them to the file ``path``. Skip answers that an earlier run has finished.

    Return the exit code.
    """
    from minillm.jobs.part_files import PartFiles

    kept = f"finished answers are kept next to {path}; the same command resumes the run"
    try:
        with closing(PartFiles(path, job.name())) as parts:
            parts.open()
            finished = parts.finished()
            left = [row for row in rows if row.index not in finished]
            began, count = time.monotonic(), 0
            with GenerationBar(len(left), enabled=not job.arguments.quiet) as bar:
                for answer in source.answers(left):
                    parts.add(answer)
                    count += num_tokens(answer)
                    bar.advance(num_tokens(answer))
            seconds = time.monotonic() - began
            failed = parts.merge([row.index for row in rows])
    except KeyboardInterrupt:
        say(f"stopped; {kept}")
        return 130
    except OSError as error:
        raise MinillmError(f"cannot write {error.filename or path}: {error.strerror}; {kept}") from None
    except UsageError:
        raise
    except MinillmError as error:
        raise MinillmError(f"{error}; {kept}") from None
    say(
        f"{_prompts(len(left))} ({len(rows) - len(left)} were finished before), {count:,} tokens in {seconds:.1f} s: "
        f"{count / max(seconds, 1e-9):,.0f} tokens a second"
    )
    return _tell_failures(failed, len(rows))


def prompt_table(output: RequestOutput, tokenizer: Tokenizer | None) -> list[str]:
    """Return a table of the scores of a prompt's tokens: a heading, a line per token, and the sum."""

    def text(token_id: int) -> str:
        return str(token_id) if tokenizer is None else clean_line(repr(tokenizer.token_text(token_id)), 40)

    lines, total, count = [f"{'logprob':>9} {'rank':>6}  token"], 0.0, 0
    for token_id, token in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
        if token is None:
            lines.append(f"{'-':>9} {'-':>6}  {text(token_id)}")
            continue
        best = ", ".join(f"{text(other)} {logprob:.3f}" for other, logprob in token.top)
        lines.append(f"{token.logprob:9.3f} {token.rank:6}  {text(token_id)}" + (f"  (best: {best})" if best else ""))
        total, count = total + token.logprob, count + 1
    mean = f", {total / count:.3f} per token" if count else ""
    return [*lines, f"{total:9.3f} total{mean}"]


def _tell_failures(failed: int, total: int) -> int:
    """Print the number of failed requests, and return the exit code."""
    if failed:
        say(f"{failed} of {_prompts(total)} failed")
    return 1 if failed else 0


def _prompts(count: int) -> str:
    return f"{count:,} prompt{'' if count == 1 else 's'}"
