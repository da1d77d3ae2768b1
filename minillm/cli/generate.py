"""``minillm generate``: complete prompts, and write the completions in the prompts' order."""

from __future__ import annotations

import argparse
import codecs
import hashlib
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.cli.grammars import given_grammar
from minillm.cli.options import given
from minillm.cli.prompt_file import read_requests
from minillm.config import EngineConfig
from minillm.errors import MinillmError, UsageError
from minillm.jobs.engines import Engines, Task
from minillm.jobs.part_file import PartFile, check_output
from minillm.jobs.rows import Answer, InputRow, Style, num_tokens
from minillm.params import BeamSearchParams, Params, SamplingParams
from minillm.progress import GenerationBar, loading_bar, say
from minillm.system import expanded, import_torch
from minillm.text.safe import clean, clean_line, json_line
from minillm.user_config import CALM_SAMPLING, CHAT_SAMPLING, read_config

if TYPE_CHECKING:
    from minillm.jobs.row_engine import RowEngine
    from minillm.llm import LLM
    from minillm.text.tokenizer import Tokenizer

MOST_ENGINES = 4096


def run(arguments: argparse.Namespace, *, for_chat: bool = False) -> int:
    """Complete the prompts. Return the exit code.

    With ``for_chat``, load the model as the chat does, and use the chat's sampling defaults.
    """
    _check_engines(arguments)
    config, grammar = read_config(arguments.config), given_grammar(arguments)
    if arguments.parse_special and (arguments.chat or arguments.system):
        raise UsageError("--parse-special is for raw prompts; in a chat, only the template adds control tokens")
    requests = read_requests(arguments.prompts, arguments.file, arguments.form)
    if arguments.shard:
        requests = requests[_shard(arguments.shard, len(requests))]
    style = Style(bool(arguments.chat or arguments.system), arguments.system, bool(arguments.parse_special))
    options = {**config.engine, **given(arguments, EngineConfig)}
    task = Task(config.choose_model(arguments.model), options, style)
    _check_torchrun(int(options.get("tensor_parallel_size", 1)))
    flags = {**given(arguments, SamplingParams), **given(arguments, BeamSearchParams), **grammar}

    def rows(defaults: Mapping[str, Any]) -> list[InputRow]:
        """Return the requests with their parameters. ``defaults`` have the lowest precedence."""
        return [replace(row, params=config.request_values({**flags, **row.params}, defaults)) for row in requests]

    name = _fingerprint(task, requests, rows({}))  # reports errors in the requests before the model is loaded
    output = _output(arguments) if arguments.output is not None else None
    if output is not None:
        failed = check_output(output, name, len(requests), overwrite=arguments.force)
        PartFile(output, name).discard_merged()
        if failed is not None:
            say(f"{output} is finished: {_prompts(len(requests))}, {failed} failed; --force computes all again")
            return 1 if failed else 0
    with _engines(task, arguments, for_chat=for_chat) as source:
        defaults = _sampling(source.defaults(), CHAT_SAMPLING if for_chat else CALM_SAMPLING)
        complete = [_with_seed(row) for row in rows(defaults)]
        params = [row.sampling() for row in complete]
        raw = not (style.chat or style.parse_special or arguments.quiet or arguments.json)
        if raw and not isinstance(source, Engines):
            _suggest_template(source.llm, complete, params)
        if isinstance(source, Engines) or output is not None:
            assert output is not None, "several engines need an output file"
            return _to_file(source, complete, PartFile(output, name), quiet=arguments.quiet)
        return _to_stdout(source, style, complete, in_json=arguments.json, quiet=arguments.quiet)


def _fingerprint(task: Task, requests: list[InputRow], rows: list[InputRow]) -> str:
    """Return a fingerprint of the requests and their settings: 16 hexadecimal digits.

    A stopped run can be resumed only by a command with the fingerprint of the stopped run. Raises UsageError if a
    parameter is invalid.
    """
    about = [task.model, task.style, requests, [row.sampling() for row in rows]]
    if template := EngineConfig(chat_template=task.engine.get("chat_template")).chat_template:
        about.append(template)
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _sampling(of_model: Mapping[str, Any], ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge the model's own defaults with ``ours``, the defaults of minillm. The model's values win.

    If the model sets any of temperature, top_p, top_k and min_p, temperature and top_p in ``ours`` are left out.
    """
    if {"temperature", "top_p", "top_k", "min_p"} & set(of_model):
        ours = {name: value for name, value in ours.items() if name not in CALM_SAMPLING}
    return {**ours, **of_model}


def _suggest_template(llm: LLM, rows: list[InputRow], params: list[Params]) -> None:
    """Print a hint if raw prompts go to a model that has a chat template."""
    tokenizer = llm.engine.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        return
    if any(isinstance(row.prompt, str) and its.max_tokens for row, its in zip(rows, params, strict=True)):
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


def _shard(text: str, total: int) -> slice:
    """Return which requests belong to the shard ``text``, such as ``0/8`` for the first of eight.

    They are consecutive, so that the shards' output files can be concatenated.

    Raises UsageError if ``text`` is not a valid shard of ``total`` requests.
    """
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    index, count = map(int, found.groups()) if found else (1, 0)
    if index >= count:
        raise UsageError(f"--shard is I/N with I from 0 to N - 1, such as 0/8, not {text[:40]!r}")
    if total < count:
        raise UsageError(f"--shard {text}: there are only {_prompts(total)}; use at most {total} shards")
    return slice(index * total // count, (index + 1) * total // count)


def _output(arguments: argparse.Namespace) -> Path:
    """Return the path of the output file. Each shard has its own file: ``out.jsonl`` becomes ``out.00-of-16.jsonl``."""
    if not arguments.output:
        raise UsageError("--output is empty: give a file's name")
    if arguments.output == "-":
        raise UsageError("--output is a file's name, not '-'; --json prints the JSON objects")
    path = expanded(arguments.output, "--output")
    if not path.name:
        raise UsageError(f"--output is a file's name, not {arguments.output!r}")
    if arguments.shard is not None:
        index, count = arguments.shard.split("/")
        path = path.with_name(f"{path.stem}.{int(index):0{len(str(int(count)))}}-of-{int(count)}{path.suffix}")
    return Path(os.path.realpath(path)) if path.is_symlink() else path  # else the output would replace the link


@contextmanager
def _engines(task: Task, arguments: argparse.Namespace, *, for_chat: bool) -> Iterator[RowEngine | Engines]:
    """Start the engines that the command line asks for. Stop them when the context closes."""
    with ExitStack() as stack:
        report = stack.enter_context(loading_bar(enabled=not arguments.quiet))
        if arguments.ray:
            from minillm.ray import RayEngines

            yield stack.enter_context(RayEngines(task, arguments.engines or 1, arguments.ray))
        elif (arguments.replicas or 1) > 1:
            from minillm.jobs.engine_processes import EngineProcesses

            yield stack.enter_context(EngineProcesses(task, arguments.replicas, report))
        else:
            import_torch()  # engines in other processes need no torch in this one
            from minillm.jobs.row_engine import RowEngine

            if for_chat:
                from minillm.cli.chat import load

                llm = load(task.model, task.engine, report)
            else:
                from minillm.llm import LLM

                llm = LLM(task.model, on_progress=report, on_message=say, **task.engine)
            yield RowEngine(llm, task.style)


def _to_stdout(source: RowEngine, style: Style, rows: list[InputRow], *, in_json: bool, quiet: bool) -> int:
    """Print the answers in the order of their prompts. Return the exit code."""
    prompt, params = style.request(rows[0], source.llm)  # raises what is wrong with all rows, such as --chat
    alone = len(rows) == 1 and params.num_sequences == 1
    if alone and isinstance(params, SamplingParams) and params.prompt_logprobs is None and not in_json:
        for delta in source.llm.stream(prompt, params):
            print(clean(delta.text), end="", flush=True)
        print()
        return 0
    early: dict[int, Answer] = {}  # answers that wait for those before them
    following = finished = 0
    with GenerationBar(len(rows), enabled=not quiet) as bar:

        def show(answer: Answer) -> None:
            where, tokenizer = rows[answer["index"]].where, source.llm.engine.tokenizer
            for line in _lines(answer, where, tokenizer, in_json=in_json, alone=alone):
                bar.print(line)

        try:
            for answer in source.answers(rows):
                early[answer["index"]] = answer
                finished += answer["error"] is None
                while following in early:
                    following += 1
                    show(early.pop(following - 1))  # removed first: an interrupted line is not written again
                bar.advance(num_tokens(answer))
        except KeyboardInterrupt:
            for index in sorted(early):
                show(early[index])
            say(f"stopped; {finished} of {_prompts(len(rows))} are finished")
            return 130
    return _say_failures(len(rows) - finished, len(rows))


def _lines(answer: Answer, where: str, tokenizer: Tokenizer | None, *, in_json: bool, alone: bool) -> Iterator[str]:
    """Yield the lines that show an answer on stdout. If the request failed, write a message to stderr.

    Args:
        where: the origin of the prompt, for the message.
        alone: only one text is shown, so it gets no heading.
    """
    if in_json:
        in_utf8 = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
        yield json_line(answer, ascii_only=not in_utf8)
        return
    if answer["error"] is not None:
        say(f"{where or 'prompt'}: {answer['error']}")
    elif answer["prompt_logprobs"] is not None:
        yield from _prompt_table(answer, tokenizer)
    for completion in answer["outputs"]:
        if not alone:
            number = answer["index"] + 1
            name = f"{number}.{completion['index'] + 1}" if len(answer["outputs"]) > 1 else str(number)
            score = "" if completion["score"] is None else f" (score {completion['score']:.2f})"
            yield f"--- {name}{score} ---"
        if completion["token_ids"] or answer["prompt_logprobs"] is None:
            yield clean(completion["text"])


def _prompt_table(answer: Answer, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield a table of the scores of a prompt's tokens: a heading, a line per token, and the sum."""

    def text(token_id: int) -> str:
        return str(token_id) if tokenizer is None else clean_line(repr(tokenizer.token_text(token_id)), 40)

    yield f"{'logprob':>9} {'rank':>6}  token"
    total, count = 0.0, 0
    for token_id, token in zip(answer["prompt_token_ids"], answer["prompt_logprobs"], strict=True):
        if token is None:
            yield f"{'-':>9} {'-':>6}  {text(token_id)}"
            continue
        best = ", ".join(f"{text(other)} {logprob:.3f}" for other, logprob in token["top"])
        yield f"{token['logprob']:9.3f} {token['rank']:6}  {text(token_id)}" + (f"  (best: {best})" if best else "")
        total, count = total + token["logprob"], count + 1
    yield f"{total:9.3f} total" + (f", {total / count:.3f} per token" if count else "")


def _to_file(source: RowEngine | Engines, rows: list[InputRow], part: PartFile, *, quiet: bool) -> int:
    """Compute the answers, and write them to the output file of ``part``. Skip answers of an earlier run.

    Return the exit code.
    """
    kept = f"finished answers are kept next to {part.output}; the same command resumes the run"
    try:
        with closing(part):
            part.open()
            finished = part.finished()
            left = [row for row in rows if row.index not in finished]
            began = time.monotonic()
            with GenerationBar(len(left), enabled=not quiet) as bar:
                for answer in source.answers(left):
                    part.add(answer)
                    bar.advance(num_tokens(answer))
            seconds = time.monotonic() - began
            failed = part.merge([row.index for row in rows])
    except KeyboardInterrupt:
        say(f"stopped; {kept}")
        return 130
    except OSError as error:
        raise MinillmError(f"cannot write {error.filename or part.output}: {error.strerror}; {kept}") from None
    except UsageError:
        raise
    except MinillmError as error:
        raise MinillmError(f"{error}; {kept}") from None
    say(
        f"{_prompts(len(left))} ({len(rows) - len(left)} were finished before), {bar.tokens:,} tokens "
        f"in {seconds:.1f} s: {bar.tokens / max(seconds, 1e-9):,.0f} tokens a second"
    )
    return _say_failures(failed, len(rows))


def _say_failures(failed: int, total: int) -> int:
    """Print the number of failed requests, and return the exit code."""
    if failed:
        say(f"{failed} of {_prompts(total)} failed")
    return 1 if failed else 0


def _prompts(count: int) -> str:
    return f"{count:,} prompt{'' if count == 1 else 's'}"
