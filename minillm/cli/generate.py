"""``minillm generate``: complete prompts, and write the completions in their order."""

from __future__ import annotations

import argparse
import codecs
import hashlib
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.cli.grammars import given_grammar
from minillm.cli.options import given
from minillm.cli.prompt_file import Request, read_requests
from minillm.config import EngineConfig
from minillm.errors import MinillmError, UsageError
from minillm.outputs import RequestOutput
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.progress import GenerationBar, loading_bar, say
from minillm.system import expanded, import_torch
from minillm.text.safe import clean, clean_line, json_line
from minillm.user_config import CALM_SAMPLING, CHAT_SAMPLING, UserConfig, read_config

if TYPE_CHECKING:
    from minillm.llm import LLM
    from minillm.parallel.shared_work import PartFiles
    from minillm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Job:
    """Hold the requests, with their settings from the command line and the configuration."""

    arguments: argparse.Namespace
    config: UserConfig
    requests: list[Request]
    grammar: Mapping[str, Any] = field(default_factory=dict)  # the parameter ``grammar``, if it is set

    @property
    def model(self) -> str:
        return self.config.choose_model(self.arguments.model)

    @property
    def chat(self) -> bool:
        return bool(self.arguments.chat or self.arguments.system)

    def params(self, defaults: Mapping[str, Any] = {}) -> list[Params]:
        """Return the parameters of each request; ``defaults`` are the model's own. Raises UsageError."""
        flags = {**given(self.arguments, SamplingParams), **given(self.arguments, BeamSearchParams), **self.grammar}
        found: list[Params] = []
        for request in self.requests:
            values = self.config.request_values({**flags, **request.params}, defaults)
            try:
                found.append((BeamSearchParams if "beam_width" in values else SamplingParams)(**values))
            except UsageError as error:
                raise UsageError(f"{request.where}: {error}") from None
        return found

    def name(self) -> str:
        """Return a fingerprint of the requests and their settings: 16 hexadecimal digits."""
        system, parse_special = self.arguments.system, self.arguments.parse_special
        about = [self.model, self.chat, system, parse_special, self.requests, self.params()]
        engine = {**self.config.engine, **given(self.arguments, EngineConfig)}
        if template := EngineConfig(chat_template=engine.get("chat_template")).chat_template:
            about.append(template)
        return hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def prompt(self, request: Request, llm: LLM) -> str | list[int]:
        """Return a request's text or token ids; for a conversation, the ids from the model's template."""
        messages, system = request.messages, self.arguments.system
        if messages is None and self.chat:
            if not isinstance(request.prompt, str):
                raise UsageError(f"{request.where}: --chat needs text, not token ids")
            messages = [{"role": "user", "content": request.prompt}]
        if messages is not None and system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        if messages is not None:
            return llm.tokenizer.apply_chat_template(messages)
        assert request.prompt is not None
        return llm.token_ids(request.prompt, parse_special=True) if self.arguments.parse_special else request.prompt


def run(arguments: argparse.Namespace, *, for_chat: bool = False) -> int:
    """Complete the prompts; with ``for_chat``, with the defaults of the chat, which also loads the model."""
    config = read_config(arguments.config)
    engine = {**config.engine, **given(arguments, EngineConfig)}
    _check_replicas(arguments, int(engine.get("tensor_parallel_size", 1)))
    if arguments.parse_special and (arguments.chat or arguments.system):
        raise UsageError("--parse-special is for raw prompts; in a chat, only the template adds control tokens")
    job = Job(
        arguments, config, read_requests(arguments.prompts, arguments.file, arguments.form), given_grammar(arguments)
    )
    job.params()  # report errors in the requests before the model is loaded
    output = expanded(arguments.output, "--output") if arguments.output else None
    if output is not None:
        from minillm.parallel.shared_work import PartFiles

        PartFiles.check(output)
        failed = None if arguments.force else PartFiles(output, job.name()).failures(len(job.requests))
        if failed is not None:
            say(f"{output} is finished: {_prompts(len(job.requests))}, {failed} failed; --force computes all again")
            return 1 if failed else 0
    import_torch()
    with loading_bar(enabled=not arguments.quiet) as report:
        if for_chat:
            from minillm.cli.chat import load

            llm = load(job.model, engine, report)
        else:
            from minillm.llm import LLM

            llm = LLM(job.model, on_progress=report, on_message=say, **engine)
    defaults = _sampling(llm.engine.defaults, CHAT_SAMPLING if for_chat else CALM_SAMPLING)
    params = [_with_seed(each) for each in job.params(defaults)]
    _suggest_template(job, llm, params)
    return _to_stdout(job, llm, params) if output is None else _to_file(job, llm, params, output)


def _sampling(of_model: Mapping[str, Any], ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model's defaults, completed with ours; our sampling applies only if the model sets none."""
    if {"temperature", "top_p", "top_k", "min_p"} & set(of_model):
        ours = {name: value for name, value in ours.items() if name not in CALM_SAMPLING}
    return {**ours, **of_model}


def _suggest_template(job: Job, llm: LLM, params: list[Params]) -> None:
    """Say once that a model has a chat template which raw prompts do not use."""
    from minillm.parallel.launch import Torchrun

    arguments, tokenizer, torchrun = job.arguments, llm.engine.tokenizer, Torchrun.from_environment()
    if job.chat or arguments.parse_special or arguments.quiet or arguments.json or (torchrun and torchrun.rank):
        return
    if tokenizer is None or not tokenizer.has_chat_template:
        return
    if any(isinstance(each.prompt, str) and of.max_tokens for each, of in zip(job.requests, params, strict=True)):
        say("completing the text as it is; this is a chat model, and --chat applies its chat template")


def _with_seed(params: Params) -> Params:
    """Return the parameters with a random seed if they have none, so that each run differs and can be repeated."""
    if isinstance(params, BeamSearchParams) or params.seed is not None:
        return params
    return replace(params, seed=secrets.randbits(32))


def _check_replicas(arguments: argparse.Namespace, tensor_parallel_size: int) -> None:
    """Raise UsageError if several replicas would do the same work, or lack a file for it."""
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


@dataclass
class Writer:
    """Write outputs in the order of their prompts, each as soon as the previous ones are written."""

    job: Job
    write_line: Callable[[str], None]
    params: list[Params]
    tokenizer: Tokenizer | None
    several: bool  # each text gets a heading
    written: int = 0  # answers without failures
    _waiting: dict[int, RequestOutput] = field(default_factory=dict)
    _next: int = 0

    def add(self, index: int, output: RequestOutput) -> None:
        self._waiting[index] = output
        while self._next in self._waiting:
            self._write(self._next, self._waiting.pop(self._next))
            self._next += 1

    def flush(self) -> None:
        """Write all finished outputs, although earlier ones are missing."""
        for index in sorted(self._waiting):
            self._write(index, self._waiting.pop(index))

    def _write(self, index: int, output: RequestOutput) -> None:
        self.written += output.error is None
        request = self.job.requests[index]
        if self.job.arguments.json:
            in_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
            fields = _as_json(index, request, output, self.params[index], self.tokenizer)
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


def _to_stdout(job: Job, llm: LLM, params: list[Params]) -> int:
    prompts = [job.prompt(request, llm) for request in job.requests]
    alone = len(prompts) == 1 and params[0].num_sequences == 1 and isinstance(params[0], SamplingParams)
    if alone and not job.arguments.json and params[0].prompt_logprobs is None:
        for delta in llm.stream(prompts[0], params[0]):
            print(clean(delta.text), end="", flush=True)
        print()
        return 0
    with GenerationBar(len(prompts), enabled=not job.arguments.quiet) as bar:
        several = len(prompts) > 1 or params[0].num_sequences > 1
        writer = Writer(job, bar.print, params, llm.engine.tokenizer, several)
        try:
            for index, output in llm.as_completed(prompts, params):
                writer.add(index, output)
                bar.advance(_num_tokens(output))
        except KeyboardInterrupt:
            writer.flush()
            say(f"stopped; {writer.written} of {_prompts(len(prompts))} are finished")
            return 130
    return _tell_failures(len(prompts) - writer.written, len(prompts))


def _to_file(job: Job, llm: LLM, params: list[Params], path: Path) -> int:
    """Write answers to a file, by one or several replicas. No answer is computed twice."""
    from torch.distributed import DistError

    from minillm.parallel.channel import RankDied
    from minillm.parallel.shared_work import PartFiles

    kept = f"finished answers are kept next to {path}; the same command resumes the run"
    try:
        with closing(PartFiles(path, job.name())) as parts:
            return _share(job, llm, params, parts)
    except KeyboardInterrupt:
        say(f"stopped; {kept}")
        return 130
    except RankDied as error:
        raise MinillmError(f"{error}; {kept}") from None
    except OSError as error:
        raise MinillmError(f"cannot write {error.filename or path}: {error.strerror}; {kept}") from None
    except DistError:  # of torchrun's store, on the first node
        raise MinillmError(f"the first node is gone; {kept}") from None


def _share(job: Job, llm: LLM, params: list[Params], parts: PartFiles) -> int:
    """Compute this replica's part of the requests; the first replica merges all parts."""
    from minillm.parallel.shared_work import Replicas

    replicas, total = Replicas.find(llm.config.tensor_parallel_size), len(params)
    parts.open(replicas.index)
    left = replicas.agreed("left", lambda: sorted(set(range(total)) - set(parts.finished())))

    def take(room: int) -> list[tuple[int, Any, Params]]:
        taken = [left[n] for n in replicas.take(len(left), room)]
        return [(i, job.prompt(job.requests[i], llm), params[i]) for i in taken]

    replicas.meet("ready")
    began, count = time.monotonic(), 0
    with GenerationBar(len(left), enabled=not job.arguments.quiet and replicas.count == 1) as bar:
        for index, output in llm.work_off(take):
            parts.add(_as_json(index, job.requests[index], output, params[index], llm.engine.tokenizer))
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


def _as_json(
    index: int, request: Request, output: RequestOutput, params: Params, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the fields of RequestOutput, with the seed of samples, durations instead of times, and tokens as text."""
    result = asdict(output)
    if isinstance(params, SamplingParams):
        result["seed"] = params.seed
    result["index"] = index
    result["request_id"] = f"request-{index}" if request.name is None else request.name
    if output.prompt is None and isinstance(request.prompt, str):
        result["prompt"] = request.prompt
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


def prompt_table(output: RequestOutput, tokenizer: Tokenizer | None) -> list[str]:
    """Return the scores of a prompt's tokens, a line each, and their sum."""

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


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)
