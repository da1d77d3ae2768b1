"""Several engine processes with one model, served at one address. An engine that ends is restarted.

A request goes to the engine that has computed the beginning of its prompt before, unless that engine is much busier
than another one. Forks, pinned prefixes and sessions go to the engine that has the data they refer to.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minillm.errors import MinillmError
from minillm.server.client import Answer, CallClient, EngineDied, LoadingEvent
from minillm.service import call_messages as messages
from minillm.service.messages import Load, Loaded
from minillm.service.process import EngineProcess, start_engine

_PIECE = 128  # characters or token ids of a prompt that get a key together
_MOST_PIECES = 512  # maximum number of pieces of a prompt
_MOST_PREFIXES = 1 << 16  # number of keys with a stored engine
_MOST_ANSWERS = 1 << 14  # number of answers with a stored engine
_SLACK = 4  # an engine is too busy to be preferred if it has more than 2 * (requests of the idlest engine) + _SLACK
_MOST_RESTARTS = 5  # maximum restarts of an engine in _RESTART_WINDOW seconds
_RESTART_WINDOW = 600.0
_SHARED_FIGURES = ("block_size", "disk_limit", "disk_bytes")  # the engines have one size of blocks and one disk cache


@dataclass
class PrefixEngines:
    """Remembers which engine has computed which prefixes of recent prompts."""

    _engines: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def choose(self, keys: list[int], loads: Sequence[float]) -> int:
        """Choose the engine for a prompt, and remember the choice. Return the index of the engine.

        Args:
            keys: the keys of the prompt, from `keys_of`.
            loads: number of requests of each engine; infinity for an engine that accepts no requests.
        """
        idlest = min(range(len(loads)), key=loads.__getitem__)
        found = next((self._engines[key] for key in reversed(keys) if key in self._engines), idlest)
        chosen = found if loads[found] <= 2 * loads[idlest] + _SLACK else idlest
        for key in keys:
            self._engines[key] = chosen
            self._engines.move_to_end(key)
        while len(self._engines) > _MOST_PREFIXES:
            self._engines.popitem(last=False)
        return chosen


def keys_of(prompt: Any, salt: str | None) -> list[int]:
    """Return the keys of a prompt's prefixes: one for each multiple of `_PIECE` characters or token ids, in order.

    Prompts with equal keys begin with the same text (or ids) and have the same ``salt``.
    """
    if isinstance(prompt, messages.Conversation):
        head = msgspec.json.encode([prompt.tools, prompt.template_options]).decode()
        prompt = head + "".join(msgspec.json.encode(message).decode() for message in prompt.messages)
    keys: list[int] = []
    key = hash(salt)
    for start in range(0, min(len(prompt or ""), _PIECE * _MOST_PIECES) - _PIECE + 1, _PIECE):
        piece = prompt[start : start + _PIECE]
        key = hash((key, piece if isinstance(piece, str) else tuple(piece)))
        keys.append(key)
    return keys


@dataclass
class Replicas:
    """Several engines that act as one. Create it with `start`.

    Attributes:
        begin: starts an engine, given its index.
        listeners: callbacks that receive events, by session name.
        answered: callbacks that are called with the request id of an ended answer, by session name.
        lost: called with the index of an engine that has ended. All data of this engine is gone.
        ended: set when no engine is left and none will be restarted.
    """

    begin: Callable[[int], Awaitable[CallClient]]
    engines: list[CallClient] = field(default_factory=list)
    listeners: dict[str, Callable[[Any], object]] = field(default_factory=dict)
    answered: dict[str, Callable[[str], object]] = field(default_factory=dict)
    lost: Callable[[int], object] = lambda number: None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _prefix_engines: PrefixEngines = field(default_factory=PrefixEngines)
    _answer_engines: OrderedDict[str, int] = field(default_factory=OrderedDict)  # index of the engine, by request
    _open_engines: dict[str, int] = field(default_factory=dict)  # the same, by open session or pinned prefix
    _keeping: list[asyncio.Task[None]] = field(default_factory=list)
    _refusal: str = ""  # why no more requests are accepted; empty while they are

    @classmethod
    async def start(
        cls, processes: Sequence[EngineProcess], load: Load, on_loading: Callable[[LoadingEvent], object]
    ) -> Replicas:
        """Load a model in ``processes``, which `start_engine` returned. The first one reports the progress."""

        async def begin(number: int) -> CallClient:
            is_first = number == len(self.engines)  # a restarted engine needs a new process and reports no progress
            process = processes[number] if is_first else start_engine(number, len(processes), load.options)
            report = on_loading if is_first and number == 0 else lambda event: None
            engine = await CallClient.start(process, load, report)
            engine.listeners, engine.answered = self.listeners, self.answered
            return engine

        self = cls(begin)
        for number in range(len(processes)):
            self.engines.append(await begin(number))
        return self

    async def loaded(self) -> Loaded:
        """Wait until all engines are ready. From then on, restart an engine that ends.

        Return the facts about the first engine, with the sum of ``max_num_seqs`` over all engines.

        Raises:
            MinillmError: an engine cannot be loaded.
        """
        found = await asyncio.gather(*(engine.ready for engine in self.engines))
        for number, each in enumerate(found):
            if each.device.split(":")[0] != found[0].device.split(":")[0]:
                raise MinillmError(f"replica {number} found no GPU of its own; start fewer replicas")
        self._keeping = [asyncio.create_task(self._keep(number)) for number in range(len(self.engines))]
        return msgspec.structs.replace(found[0], max_num_seqs=sum(each.max_num_seqs for each in found))

    async def _keep(self, number: int) -> None:
        """Restart engine ``number`` whenever it ends, with growing delays. Stop doing so if it ends too often."""
        ends: list[float] = []
        while True:
            await self.engines[number].ended.wait()
            self._forget_engine(number)
            now = asyncio.get_running_loop().time()
            ends = [*(each for each in ends if now - each < _RESTART_WINDOW), now]
            if len(ends) > _MOST_RESTARTS:
                self._say(number, "it ended too often and is not restarted")
                break
            delay = 2 ** (len(ends) - 1) - 1
            self._say(number, f"restarting it{f' in {delay} s' if delay else ''}")
            await asyncio.sleep(delay)
            try:
                engine = await self.begin(number)
            except OSError as error:  # too many processes or open files, or too little memory
                self.engines[number].failure = MinillmError(f"no engine process can be started: {error.strerror}")
                continue
            try:
                await engine.ready
                self.engines[number] = engine
            except MinillmError as error:
                self.engines[number].failure = error
            finally:
                if self.engines[number] is not engine:
                    await engine.stop()
        if sum(task.done() for task in self._keeping) == len(self.engines) - 1:  # all other engines have ended for good
            self.ended.set()

    def _forget_engine(self, number: int) -> None:
        """Drop everything stored about an engine that has ended, and end its streams of events."""
        self.lost(number)
        for engines in (self._answer_engines, self._open_engines):
            for name in [name for name, home in engines.items() if home == number]:
                del engines[name]
                if (listener := self.listeners.get(name)) is not None:
                    listener(None)

    def _say(self, number: int, what: str) -> None:
        name = f"replica {number}: " if len(self.engines) > 1 else ""
        sys.stderr.write(f"minillm: {name}{self.engines[number].failure}; {what}\n")

    @property
    def failure(self) -> MinillmError:
        """Return the error of the first engine that has ended."""
        found = next((each.failure for each in self.engines if each.ended.is_set()), None)
        return found or MinillmError("the engine has ended")

    @property
    def serves(self) -> bool:
        """Return whether at least one engine accepts requests."""
        return not all(each.trouble for each in self.engines)

    def check(self) -> None:
        """Raise EngineDied if no engine accepts requests."""
        if not self.serves:
            raise EngineDied(f"{self.trouble}; send the request again later")

    @property
    def trouble(self) -> str:
        """Return which engines accept no requests, and why; empty if all engines accept requests."""
        if len(self.engines) == 1:
            return self.engines[0].trouble
        troubles = [(number, each.trouble) for number, each in enumerate(self.engines)]
        return "; ".join(f"replica {number}: {trouble}" for number, trouble in troubles if trouble)

    def figures(self) -> list[messages.Figures | None]:
        """Return the last figures of each engine; None for an engine that has ended or has not reported yet."""
        return [None if each.ended.is_set() else each.figures for each in self.engines]

    @property
    def prepared(self) -> tuple[int, int]:
        """Return the number of step shapes with prepared CUDA graphs and kernels, and the number of all step shapes.

        Both are sums over all engines, and 0 if nothing needs to be prepared.
        """
        pairs = [each.prepared for each in self.engines if not each.ended.is_set()]
        return sum(done for done, _ in pairs), sum(total for _, total in pairs)

    def refuse_all(self, why: str) -> None:
        """End all running answers with the error ``why``, and accept no more requests."""
        self._refusal = why
        for engine in self.engines:
            engine.fail(why)

    async def stop(self) -> None:
        """Stop all processes."""
        for task in self._keeping:
            task.cancel()
        for engine in self.engines:  # first, because ctrl-c cancels the await below, and all processes must end
            engine.process.close()
        await asyncio.gather(*self._keeping, *(engine.stop() for engine in self.engines), return_exceptions=True)

    def send(self, call: messages.SessionCall) -> None:
        """Send a call of a session to the engine that serves this session."""
        if isinstance(call, messages.OpenSession):
            self._open_engines[call.session] = self._choose(None, None)
        home = self._open_engines.get(call.session, 0)
        if isinstance(call, messages.CloseSession):
            self._open_engines.pop(call.session, None)
        self.engines[home].send(call)

    def complete(self, call: messages.Complete, news: asyncio.Event) -> Answer:
        """Start a request and return its answer. ``news`` is set whenever an event of the answer arrives.

        Raises EngineDied if the request is rejected.
        """
        if self._refusal:
            raise EngineDied(self._refusal)
        if call.fork is None:
            home = self._choose(call.prompt, call.salt)
        else:
            home = self._answer_engines.get(call.fork.request_id, 0)
        self._settle(call.request_id, home)
        return self.engines[home].complete(call, news)

    def leave(self, answer: Answer) -> None:
        """Drop an answer. If the answer's request has not ended, abort the request."""
        for engine in self.engines:
            if answer.request_id in engine.answers:
                engine.leave(answer)

    async def ask(self, make: Callable[[str], messages.Call]) -> Any:
        """Send a call to the engine that has the call's data, and return the result.

        ``make`` creates the call from the call's id. A call that reads the cache is sent to all engines, and the
        results are merged.

        Raises UsageError if the call is rejected, EngineDied if the engine accepts no requests.
        """
        if len(self.engines) == 1:
            return await self.engines[0].ask(make)
        match make(""):
            case messages.ReadCache():
                self.check()
                return _joined([await engine.ask(make) for engine in self.engines if not engine.trouble])
            case messages.PinPrefix() as call:
                home = self._choose(call.prompt, call.salt)
                found = await self.engines[home].ask(make)
                self._open_engines[found["id"]] = home
                return {**found, "replica": home}
            case messages.UnpinPrefix(prefix_id=name):
                found = await self.engines[self._open_engines.get(name, 0)].ask(make)
                self._open_engines.pop(name, None)
                return found
        return await self.engines[self._choose(None, None)].ask(make)

    def _choose(self, prompt: Any, salt: str | None) -> int:
        """Return the index of the engine for a prompt. Prefer engines that accept requests."""
        if len(self.engines) == 1:
            return 0
        loads = [math.inf if engine.trouble else len(engine.answers) for engine in self.engines]
        return self._prefix_engines.choose(keys_of(prompt, salt), loads)

    def _settle(self, name: str, home: int) -> None:
        self._answer_engines[name] = home
        while len(self._answer_engines) > _MOST_ANSWERS:
            self._answer_engines.popitem(last=False)


def _joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the cache states of several engines.

    The figures are added up, except for figures that all engines share. The lists of block tables are joined, and each
    table gets the index of its engine.
    """
    figures = {
        name: (max if name in _SHARED_FIGURES else sum)(each["figures"][name] for each in found)
        for name in found[0]["figures"]
    }
    tables = [{**table, "replica": number} for number, each in enumerate(found) for table in each["tables"]]
    return {"figures": figures, "tables": tables, "replicas": [each["figures"] for each in found]}
