"""Launch Triton kernels, or only find out which variants of them a piece of work needs.

Triton compiles a variant of a kernel for each combination of argument types, alignments and constants, when it is first
launched. That takes 0.2 to 5 s. `missing_variants` runs work without launching anything, and returns the variants that
are neither in this process nor in Triton's cache. Another process can compile them: `Variant.compile`. `only_compiled`
lets work fail instead of compiling.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITCallable

from minillm.kernels.compat import INTERPRETED

try:  # not part of Triton's documented interface: without it, kernels compile at their first launch
    from triton.runtime._async_compile import active_mode
except ImportError:
    active_mode = None


class NotCompiledError(Exception):
    """A kernel's variant is not compiled, and `only_compiled` forbids compiling it. The argument is the `Variant`."""


@dataclass(frozen=True)
class Variant:
    """All that a compiler needs to know about one variant of a kernel. Two variants are equal if their keys are.

    Attributes:
        key: the SHA-256 by which Triton's cache knows the compiled variant.
        arguments: signature, constants, attributes and options, as Triton's compiler takes them.
    """

    key: str
    module: str
    name: str
    target: GPUTarget
    arguments: tuple[dict[str, Any], dict[Any, Any], dict[Any, Any], dict[str, Any]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variant) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    @classmethod
    def decode(cls, text: str | bytes) -> Variant:
        """Return the variant that `encode` has encoded."""
        key, module, name, target, arguments = _from_json(json.loads(text))
        return cls(key, module, name, GPUTarget(*target), arguments)

    def encode(self) -> str:
        """Return the variant as JSON. Raises TypeError for a constant of a kind that no kernel here has."""
        target = (self.target.backend, self.target.arch, self.target.warp_size)
        return json.dumps(_to_json((self.key, self.module, self.name, target, self.arguments)))

    @property
    def is_compiled(self) -> bool:
        """Return whether the variant is in Triton's cache."""
        return _is_cached(self.key)

    def compile(self) -> None:
        """Compile the variant into Triton's cache. This needs no GPU: without a GPU, call `set_target` first.

        If possible, also build the C function with which Python launches the variant. Triton 3.6 runs a C compiler for
        that, which takes 0.3 s for each signature; later versions need none.

        Raises any exception of Triton's compiler.
        """
        kernel = getattr(import_module(self.module), self.name).jit
        _hash_in_order(kernel)
        signature, constants, attributes, options = self.arguments
        kernel.device_caches[0]  # sets the next two attributes
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        compiled = kernel.compile(source, target=self.target, options=options)
        if self.target.backend == "cuda":
            with suppress(Exception):  # for example, there is no C compiler: the first launch reports it
                CudaLauncher(compiled.src, compiled.metadata)


def _to_json(value: Any) -> Any:
    """Return a value as JSON. Kinds of values that JSON lacks, such as tuples, become ``[kind, ...]`` lists."""
    if isinstance(value, tuple | list):
        return ["tuple" if isinstance(value, tuple) else "list", *map(_to_json, value)]
    if isinstance(value, dict):
        return ["dict", *([_to_json(name), _to_json(each)] for name, each in value.items())]
    if isinstance(value, tl.constexpr):
        return ["constexpr", _to_json(value.value)]
    if isinstance(value, tl.dtype):
        return ["dtype", value.name]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} cannot be sent to a compiler")


def _from_json(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    mark, *rest = value
    if mark == "dtype":
        return tl.dtype(*rest)
    if mark == "dict":
        return {_from_json(name): _from_json(each) for name, each in rest}
    values = map(_from_json, rest)
    return tl.constexpr(*values) if mark == "constexpr" else tuple(values) if mark == "tuple" else list(values)


class Kernel:
    """A Triton or Gluon function that Python launches: ``kernel[grid](*arguments, **options)``.

    Multiplications and additions are contracted to FMAs, unless the option ``enable_fp_fusion`` is False. (The option
    is always passed, because Triton 3.9 warns without it, and Triton 3.10 does not contract without it.)
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self.__doc__, self.__name__, self.__module__ = jit.__doc__, jit.__name__, jit.__module__
        jit._do_compile = functools.partial(_compile, jit, jit._do_compile)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        if _mode.found is None:
            return functools.partial(self.jit.run, grid=grid, warmup=False, enable_fp_fusion=True)
        return functools.partial(self._find, grid=grid)

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        """Compile or load the variant for these arguments, without launching it."""
        return self.jit.warmup(*args, grid=grid, **{"enable_fp_fusion": True, **options})

    def _find(self, *args: Any, grid: Any, **options: Any) -> None:
        launch = self, *map(_as_argument, args), *options.items()
        if launch in _mode.seen:  # all layers launch the same variants, and Triton needs 0.3 ms to find one
            return
        _mode.seen.add(launch)
        with suppress(NotCompiledError):  # `_compile` has noted it
            self.jit.run(*args, grid=grid, warmup=True, **{"enable_fp_fusion": True, **options})


def _as_argument(value: Any) -> Any:
    """Return all that a variant of a kernel can depend on in an argument, as a hashable value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    return value if isinstance(value, bool | int | float | str | None) else object()  # others equal nothing


def launched(jit: Any) -> Any:
    """Return a function of `triton.jit` or `gluon.jit` as a `Kernel`. Under the interpreter, return it unchanged."""
    return jit if INTERPRETED.value else Kernel(jit)


class _Mode(threading.local):
    found: list[Variant] | None = None  # of `missing_variants`
    seen: set[Any] = set()  # noqa: RUF012 (each call of `missing_variants` sets its own): launches
    only_compiled = False
    unfinished: Collection[str] = ()


_mode = _Mode()


def missing_variants(work: Callable[[], object], unfinished: Collection[str] = ()) -> list[Variant]:
    """Run ``work`` without launching kernels. Return the variants that must be compiled before ``work`` can run.

    PyTorch's own operations run as usual, so the work's results are meaningless, and must not be used as indices.
    ``unfinished``: keys of variants that another process is compiling. They count as missing even if they are already
    in Triton's cache: their launchers may not be.
    """
    found: list[Variant] = []
    with _as_mode(found=found, seen=set(), unfinished=unfinished):
        work()
    return list(dict.fromkeys(found))


def finds_variants() -> bool:
    """Return whether this thread runs inside `missing_variants`, where kernels are not launched."""
    return _mode.found is not None


@contextmanager
def only_compiled(unfinished: Collection[str] = ()) -> Iterator[None]:
    """Raise `NotCompiledError` instead of compiling a kernel, in this thread.

    ``unfinished``: see `missing_variants`.
    """
    with _as_mode(only_compiled=active_mode is not None, unfinished=unfinished):
        yield


@contextmanager
def _as_mode(**values: Any) -> Iterator[None]:
    """Set attributes of this thread's mode."""
    kept = {name: getattr(_mode, name) for name in values}
    vars(_mode).update(values)
    try:
        yield
    finally:
        vars(_mode).update(kept)


class _NotCachedError(Exception):
    """A variant is not in the cache; the argument is its key."""


class _FromCache:
    """A replacement for Triton's `AsyncCompileMode`. It loads variants from the cache, and compiles nothing."""

    def submit(self, key: str, load: Callable[[], Any], finish: Callable[[Any], object], *_rest: object) -> Any:
        digest = hashlib.sha256(key.encode()).hexdigest()
        if digest in _mode.unfinished or not _is_cached(digest):
            raise _NotCachedError(digest)
        kernel = load()
        finish(kernel)
        return kernel


def _is_cached(key: str) -> bool:
    return any(Path(get_cache_manager(key).cache_dir).glob("__grp__*.json"))


_hashing = threading.RLock()


def _hash_in_order(jit: Any) -> None:
    """Compute the hashes of the functions that a kernel calls, then the hash of the kernel itself.

    In Triton 3.6, the hash of a function may leave out global constants of a function that it calls. This happens if
    the called function has no hash yet. Without this order, a kernel could have another key in Triton's cache in each
    process, and would be compiled again.
    """
    with _hashing:  # while a thread computes a hash, `jit.hash` has another value
        if jit.hash is None:
            for name in jit.fn.__code__.co_names:
                called = jit.fn.__globals__.get(name)
                if isinstance(called, JITCallable) and called is not jit:
                    _hash_in_order(called)
            jit.cache_key  # noqa: B018 (computes the hash)


def _compile(jit: Any, compile_now: Callable[..., Any], *args: Any) -> Any:
    """Compile or load a variant. This function replaces `JITFunction._do_compile`."""
    _hash_in_order(jit)
    if active_mode is None or (_mode.found is None and not _mode.only_compiled):
        return compile_now(*args)
    token = active_mode.set(_FromCache())
    try:
        return compile_now(*args)
    except _NotCachedError as error:
        _, signature, _, constants, options, attributes, *_ = args
        target = jit.device_caches[driver.active.get_current_device()][2]
        arguments = (signature, constants, attributes, dict(options.__dict__))
        variant = Variant(error.args[0], jit.__module__, jit.__name__, target, arguments)
        if _mode.found is not None:
            _mode.found.append(variant)
        raise NotCompiledError(variant) from None
    finally:
        active_mode.reset(token)


class _Absent:
    """A replacement for a GPU's driver, in a compiling process that does not have the GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def set_target(target: GPUTarget) -> None:
    """Let Triton compile for a GPU that this machine, or this process, does not have."""
    driver.set_active(_Absent(target))
