"""Engines with a disk cache as processes, which answer questions until they are killed at a random moment.

Each answer must have the tokens of an engine without a disk cache. Blocks that were computed more than a second before
a kill must be on disk. The second is one of the process's CPU time, so a busy machine fails nothing.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lib.block_files import spoil
from lib.engine import engine_for, identity_of, run
from lib.models import hf_model, ours
from minillm.blockstore.files import listed
from minillm.blockstore.keys import keys_after, root
from minillm.cli.cache import is_whole
from minillm.model.llama import Llama
from minillm.params import SamplingParams

BLOCK_SIZE = 4
QUESTIONS = 48
KILLS = 25  # of one directory
MOST_SECONDS = 0.3  # between two kills, unless a process has a long life
LONG_LIFE = (1.2, 2.2)  # CPU seconds of every fourth process
LARGE, SMALL = 1 << 30, 80 * (1536 + 64)  # bytes of a quota: without and with eviction
SECOND = 1.0  # of CPU time: blocks of the last one may be lost
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
REPORT = struct.Struct("<idi")  # question, CPU seconds of the process, tokens from disk


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    answer: list[int]  # of an engine without a disk cache

    @property
    def num_cached(self) -> int:
        """Number of the prompt's tokens that are found when all its blocks are on disk."""
        return (len(self.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def questions(model: Llama, rng: random.Random) -> list[Question]:
    """Return questions that often begin alike, or have equal blocks after other beginnings.

    At each token of an answer, the most probable token leads clearly, so rounding cannot change it.
    """
    middle, found = rng.choices(range(3, 96), k=16), list[Question]()
    prefixes = [[*rng.choices(range(3, 96), k=8), *middle] for _ in range(4)]
    while len(found) < QUESTIONS:
        prompt = rng.choice(prefixes)[: rng.randint(0, 24)] + rng.choices(range(3, 96), k=rng.randint(1, 16))
        [output] = run(engine_for(model, block_size=BLOCK_SIZE), [(prompt, PARAMS)])
        [completion] = output.outputs
        if all(each.top[0][1] - each.top[1][1] > 1e-3 for each in completion.logprobs or ()):
            found.append(Question(prompt, completion.token_ids))
    return found


@dataclass
class Process:
    process_id: int
    reports: int  # the end of a pipe to read from

    def wait(self, seconds: float) -> None:
        """Wait until the process has used this CPU time, or has ended."""
        state, used = "", 0.0
        while used < seconds and state != "Z":
            time.sleep(0.02)
            state, *values = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
            used = (int(values[10]) + int(values[11])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Kills:
    """Processes that use one directory after another. ``counts``: figures for people."""

    model: Llama
    asked: list[Question]
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, directory: Path, limit: int, at_a_time: int, kills: int) -> None:
        """Kill processes that use ``directory`` with a quota of ``limit`` bytes, ``at_a_time`` of them together."""
        lasting: list[int] = []  # questions whose blocks must be on disk
        running = [self._start(directory, limit, None) for _ in range(at_a_time)]
        try:
            for _ in range(kills):
                victim = self.rng.randrange(at_a_time)
                if self.rng.random() < 0.25:
                    running[victim].wait(self.rng.uniform(*LONG_LIFE))
                else:
                    time.sleep(self.rng.uniform(0, MOST_SECONDS))
                reports, seconds = self._kill(running.pop(victim))
                if limit == LARGE:
                    lasting += [number for number, at in reports if seconds - at > SECOND and number not in lasting]
                    self._check_blocks(directory, lasting)
                elif blocks := list(listed(directory)):
                    spoil(Path(self.rng.choice(blocks).path), self.rng)
                first = self.rng.choice(lasting) if lasting and self.rng.random() < 0.8 else None
                running.append(self._start(directory, limit, first))
        finally:
            for process in running:
                self._kill(process)
        damaged = sum(not is_whole(block) for block in listed(directory))
        assert damaged == 0 or limit == SMALL, "a kill left a damaged block"
        assert not [path for path in directory.rglob(".*-*") if path.is_file()], "a temporary file is left"

    def _start(self, directory: Path, limit: int, first: int | None) -> Process:
        reader, writer = os.pipe()
        parent, seed = os.getpid(), self.rng.random()
        process = os.fork()
        if not process:
            try:
                self._live(directory, limit, first, random.Random(seed), writer, parent)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writer)
        return Process(process, reader)

    def _live(
        self, directory: Path, limit: int, first: int | None, rng: random.Random, reports: int, parent: int
    ) -> None:
        engine = engine_for(
            self.model,
            num_blocks=rng.choice([24, 60]),
            block_size=BLOCK_SIZE,
            host_blocks=rng.choice([0, 12]),
            max_num_batched_tokens=32,
            admission="optimistic",
            disk=directory,
            disk_limit=limit,
        )
        while os.getppid() == parent:
            numbers = rng.sample(range(QUESTIONS), rng.choice([1, 1, 3])) if first is None else [first]
            for number in numbers:
                engine.add_request(str(number), self.asked[number].prompt, PARAMS, owner=rng.choice([None, "one"]))
            while engine.has_work:
                engine.step()
                for output in engine.take_finished():
                    asked, number = self.asked[int(output.request_id)], int(output.request_id)
                    assert output.error is None, output.error
                    assert output.outputs[0].token_ids == asked.answer, "wrong tokens"
                    assert first is None or output.num_cached_tokens == asked.num_cached, "blocks were lost"
                    assert output.metrics is not None
                    os.write(reports, REPORT.pack(number, time.process_time(), output.metrics.num_disk_tokens))
            first = None

    def _kill(self, process: Process) -> tuple[list[tuple[int, float]], float]:
        """Kill a process. Return its answers as (question, CPU seconds at its end), and its CPU seconds."""
        os.kill(process.process_id, signal.SIGKILL)
        _, status, usage = os.wait4(process.process_id, 0)
        assert os.WIFSIGNALED(status), "a process did not start, gave a wrong answer or lost blocks"
        with open(process.reports, "rb") as file:
            reports = list(REPORT.iter_unpack(file.read()))
        self.counts.update(kills=1, answers=len(reports), tokens_from_disk=sum(each[2] for each in reports))
        return [(number, at) for number, at, _ in reports], usage.ru_utime + usage.ru_stime

    def _check_blocks(self, directory: Path, numbers: list[int]) -> None:
        """Check that the blocks of these questions are on disk."""
        names = {Path(block.path).name for block in listed(directory)}
        for question in (self.asked[number] for number in numbers):
            computed = [*question.prompt, *question.answer[:-1]]
            keys = keys_after(root(identity_of(self.model, BLOCK_SIZE), None), computed, BLOCK_SIZE)
            missing = [key.index for key in keys if key.name not in names]
            assert not missing, f"blocks {missing} are lost"
            self.counts["checked_blocks"] += len(computed) // BLOCK_SIZE


def main(directory: Path, times: int, seed: int) -> None:
    torch.set_num_threads(1)
    rng, model, began = random.Random(seed), ours(hf_model()), time.monotonic()
    kills = Kills(model, questions(model, rng), rng)
    for number, first in enumerate(range(0, times, KILLS)):
        limit, at_a_time = [LARGE, SMALL][number % 2], [1, 1, 2, 2][number % 4]
        kills.run(directory / str(number), limit, at_a_time, min(KILLS, times - first))
    figures = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in kills.counts.items())
    print(f"{figures}, {time.monotonic() - began:.0f} s")
    assert min(kills.counts[name] for name in ("answers", "tokens_from_disk", "checked_blocks")) > times


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
