"""Prepare for steps of new shapes: compile their kernels in other processes, and record their graphs in idle moments.

A step of a new shape does not wait for compilation or recording if it can run in another way: with a recorded graph of
a larger shape, or kernel by kernel. A program without idle moments (`LLM`) records a graph as soon as its kernels are
compiled.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")

_PAUSE = 32  # steps between two recordings while requests run: one takes as long as about ten steps
_WAIT = 0.01  # seconds: a request that arrives meanwhile waits as long


class Compiler(Protocol):
    """Compiles variants of kernels in other processes: see `minillm.loading.kernel_compiler.KernelCompiler`."""

    not_compiled: type[Exception]  # raised under `only_compiled`; its argument is the variant
    num_processes: int  # variants that are compiled at a time

    @property
    def num_pending(self) -> int: ...

    @property
    def num_done(self) -> int: ...

    def missing(self, work: Callable[[], object], /) -> Sequence[Any]: ...

    def only_compiled(self) -> AbstractContextManager[None]: ...

    def is_pending(self, variants: Iterable[Any], /) -> bool: ...

    def submit(self, variants: Iterable[Any], /, *, urgent: bool = False) -> None: ...

    def wait(self, variants: Iterable[Any] | None = None, seconds: float | None = None) -> bool: ...

    def relax(self) -> None: ...

    def rest(self) -> None: ...

    def close(self) -> None: ...


class NeverRaisedError(Exception):
    """The exception `NoCompiler.not_compiled`. It is never raised."""


class NoCompiler:
    """Compiles nothing: kernels compile at their first launch."""

    not_compiled: type[Exception] = NeverRaisedError
    num_processes = num_pending = num_done = 0

    def missing(self, work: Callable[[], object], /) -> Sequence[Any]:
        return ()

    def only_compiled(self) -> AbstractContextManager[None]:
        return nullcontext()

    def is_pending(self, variants: Iterable[Any], /) -> bool:
        return False

    def submit(self, variants: Iterable[Any], /, *, urgent: bool = False) -> None:
        pass

    def wait(self, variants: Iterable[Any] | None = None, seconds: float | None = None) -> bool:
        return True

    def relax(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Shape:
    """A shape of steps to prepare. Both functions must write nothing that later steps read.

    Attributes:
        work: launches the kernels of a step.
        record: records the step's graph. None: the step has no graph.
    """

    work: Callable[[], object]
    record: Callable[[], object] | None = None
    missing: Sequence[Any] = ()  # variants of kernels that were not compiled


@dataclass
class Ahead:
    """Prepares shapes while no sequence runs (`advance`), and decides how steps of unprepared shapes run.

    Args:
        compiler: compiles missing kernels.
        prepares: prepare shapes. Otherwise every graph is recorded when it is first needed.
    """

    compiler: Compiler = field(default_factory=NoCompiler)
    prepares: bool = False
    _new: list[Shape] | None = None  # None: not listed yet
    _waiting: list[Shape] = field(default_factory=list)  # for compilers
    _idles: bool = False  # the program has idle moments, in which it calls `advance`
    _total: int = 0
    _wanted: Counter[Hashable] = field(default_factory=Counter)
    _steps: int = _PAUSE  # since the last recording
    _compiled: set[Hashable] = field(default_factory=set)  # keys of work that lacks nothing
    _lacking: dict[Hashable, Sequence[Any]] = field(default_factory=dict)  # variants for which work waits, by its key
    _requested: set[Any] = field(default_factory=set)  # variants that attempts lacked
    _unsearched: dict[Hashable, Callable[[], object]] = field(
        default_factory=dict
    )  # kernels of failed attempts, by key

    @property
    def progress(self) -> tuple[int, int]:
        """The number of shapes that are prepared, and their total: (0, 0) before the first call of `advance`."""
        return self._total - len(self._new or ()) - len(self._waiting), self._total

    def advance(self, shapes: Callable[[], Iterable[Shape]]) -> bool:
        """Prepare one shape. Return False if all are prepared. A call takes at most as long as recording one graph.

        ``shapes``: returns all shapes, the most urgent first. (A stored function would keep the runner alive.)
        """
        if self._new is None:
            self._new = list(shapes()) if self.prepares else []
            self._total, self._idles = len(self._new), self.prepares
        try:
            return self._advance(self.compiler, self._new)
        except Exception:  # for example, other programs took the memory
            self.stop()
            raise

    def stop(self) -> None:
        """Stop preparing shapes, and discard the list of shapes that are not prepared yet."""
        self._new = []
        self._waiting.clear()

    def _advance(self, compiler: Compiler, new: list[Shape]) -> bool:
        ready = [shape for shape in self._waiting if not compiler.is_pending(shape.missing)]
        if not new and not ready and self._waiting:
            compiler.wait(seconds=_WAIT)
            return True
        if not new and not ready:
            compiler.rest()
            return False
        shape = ready[0] if ready else new.pop(0)
        if ready:
            self._waiting.remove(shape)
        # After waiting, other kernels may be chosen.
        shape.missing = self._recorded(shape) if shape.record else compiler.missing(shape.work)
        compiler.submit(shape.missing)
        if compiler.is_pending(shape.missing):
            self._waiting.append(shape)
        return True

    def _recorded(self, shape: Shape) -> Sequence[Any]:
        """Record a shape's graph if its kernels are compiled. Otherwise return the missing variants."""
        assert shape.record is not None
        try:
            with self.compiler.only_compiled():
                shape.record()
        except self.compiler.not_compiled:
            return self.compiler.missing(shape.work)
        return ()

    def may_record(self, key: Hashable, after: int = 1) -> bool:
        """Return whether a step may record a graph now, while requests run.

        It may if steps have asked for this graph ``after`` times, and `_PAUSE` steps have run since the last recording.
        If the program never has idle moments, a step may always record.
        """
        if not self.must_not_wait:
            return True
        self._wanted[key] += 1
        if self._wanted[key] < after or self._steps < _PAUSE:
            return False
        self._steps = 0
        return True

    def count_step(self) -> None:
        self._steps += 1

    def attempt(
        self, work: Callable[[], Result], kernels: Callable[[], object] | None = None, key: Hashable = None
    ) -> tuple[Result] | None:
        """Run ``work`` if all its kernels are compiled. Otherwise queue the first missing kernel as urgent for the
        compiler, and return None. `search` then queues the others.

        If the compiler cannot compile a kernel, run ``work`` as well: each kernel then compiles at its launch. ``work``
        is interrupted at the first kernel that is not compiled, so it must be repeatable.

        Args:
            kernels: a function that launches the same kernels as ``work`` but records no graph. None: ``work`` records
                no graph itself.
            key: identifies ``work``. While its kernels compile, a call with the same key returns None at once.

        Returns:
            The result of ``work`` in a tuple of one.
        """
        compiler = self.compiler
        if key is not None and compiler.is_pending(self._lacking.get(key, ())):
            return None
        try:
            with compiler.only_compiled():
                return (work(),)
        except compiler.not_compiled as error:
            missing: Sequence[Any] = error.args
        if not self._requested.issuperset(missing):  # else the work's other kernels were searched for, too
            self._unsearched[key] = kernels or work
        self._request(key, missing)
        return None if compiler.is_pending(missing) else (work(),)  # no process can compile them

    def search(self) -> None:
        """Queue all other kernels that failed attempts lack. This takes up to 40 ms, so call it while the device
        computes. It may overwrite what the attempted work computes.
        """
        while self._unsearched:
            key, kernels = self._unsearched.popitem()
            self._request(key, self._missing(kernels))

    def _request(self, key: Hashable, missing: Sequence[Any]) -> None:
        self.compiler.submit(missing, urgent=True)
        self._requested.update(missing)
        self._lacking[key] = missing

    def run(self, work: Callable[[], Result], kernels: Callable[[], object] | None = None) -> Result:
        """Run ``work``, and return its result. Missing kernels are compiled in parallel first. The arguments are those
        of `attempt`.

        Some kernels are optional: without them, ``work`` uses slower kernels. An example is Hopper's kernel for long
        prompts. This function does not wait for optional kernels.
        """
        awaited = None
        while True:
            try:
                with self.compiler.only_compiled():
                    return work()
            except self.compiler.not_compiled as error:
                (variant,) = error.args
            if variant == awaited:  # no process can compile it
                return work()
            awaited = variant
            self.compiler.submit(self._missing(kernels or work), urgent=True)
            self.compiler.submit([variant], urgent=True)  # before the others
            self.compiler.wait([variant])

    def is_compiled(self, kernels: Callable[[], object], key: Hashable) -> bool:
        """Return whether all kernels that ``kernels`` launches are compiled. If not, queue them as urgent for the
        compiler.

        ``key`` identifies this set of kernels.
        """
        if key not in self._compiled and not self.compiler.is_pending(self._lacking.get(key, ())):
            self._lacking[key] = self._missing(kernels)
            self.compiler.submit(self._lacking[key], urgent=True)
            if not self.compiler.is_pending(self._lacking[key]):  # or no process can compile it
                self._compiled.add(key)
        return key in self._compiled

    def _missing(self, kernels: Callable[[], object]) -> Sequence[Any]:
        """Return the variants that are not compiled.

        If they cannot be determined, warn and return none: kernels then compile at their first launch.
        """
        try:
            return self.compiler.missing(kernels)
        except Exception as error:
            warnings.warn(f"kernels compile at their first launch: {type(error).__name__}: {error}", stacklevel=2)
            return ()

    def run_once(self, work: Callable[[], Result], kernels: Callable[[], object]) -> Result:
        """Wait until all kernels are compiled, then run ``work``, and return its result.

        ``work`` must not be interrupted. ``kernels`` launches the same kernels and may be repeated.
        """
        if missing := self._missing(kernels):
            self.compiler.submit(missing, urgent=True)
            self.compiler.wait(missing)
        return work()

    def record(self, work: Callable[[], object], kernels: Callable[[], object], key: Hashable, after: int = 1) -> bool:
        """Run ``work``, which records a graph, if `may_record` allows it and all kernels are compiled.

        Return whether ``work`` was run. ``after``: see `may_record`.
        """
        return self.may_record(key, after) and self.attempt(work, kernels, key) is not None

    @property
    def must_not_wait(self) -> bool:
        """Return whether a step should not record graphs itself, because an idle moment will record them later.

        Until then, steps run without these graphs.
        """
        return self._idles

    def close(self) -> None:
        """End the compilers."""
        self.compiler.close()
