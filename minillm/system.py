"""The system below: our directories, its memory and processor, and its ctrl-c."""

import ctypes
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from minillm.errors import UsageError

_MAX_PATH = 4096  # bytes
_TRIM, _MMAP = -1, -3  # glibc's names for thresholds: of memory at the heap's end that stays, and of pieces outside it

# --- directories ------------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Downloaded models: ``$MINILLM_CACHE``, or the user's cache directory. May not exist yet."""
    return _directory("cache", "MINILLM_CACHE")


def config_dir() -> Path:
    """The configuration file: ``$MINILLM_CONFIG``, or the user's configuration directory."""
    return _directory("config", "MINILLM_CONFIG")


def data_dir() -> Path:
    """Conversations: ``$MINILLM_DATA``, or the user's data directory."""
    return _directory("data", "MINILLM_DATA")


def expanded(path: str, where: str) -> Path:
    """A path in which ~ is a home directory. ``where``: its origin, for the error.

    Raises:
        UsageError: it is no path, or there is no such home.
    """
    try:
        if "\0" in path or len(os.fsencode(path)) > _MAX_PATH:
            raise ValueError("this is no path")
        return Path(path).expanduser()
    except (RuntimeError, ValueError) as error:  # ~nosuchuser
        raise UsageError(f"{where}: {path[:60]!r}: {error}") from None


def _directory(kind: str, variable: str) -> Path:
    if value := os.environ.get(variable):
        return expanded(value, variable)
    import platformdirs

    try:
        found = Path(getattr(platformdirs, f"user_{kind}_dir")("minillm", appauthor=False))
        if found.is_absolute():  # some versions raise, others leave ~ as it is
            return found
    except RuntimeError:
        pass
    raise UsageError(f"this user has no home directory; say with {variable} where the {kind} directory is")


# --- the machine ------------------------------------------------------------------------------------------------------


def memory() -> tuple[int, int]:
    """Bytes of memory that can be taken now, and in all: of the machine, or of this process's container."""
    total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = int(_fields(meminfo)["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available, total


def resident_bytes(process: int | None = None) -> int:
    """Memory that a process has now, this one or that of a number; 0 where the system does not say."""
    statm = Path(f"/proc/{process or 'self'}/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def processor() -> str:
    """The processor's name, as far as the system knows it."""
    return _cpuinfo().get("model name", "").strip() or platform.processor() or platform.machine()


def processor_features() -> str:
    """The sets of instructions that the processor has, as far as the system knows them."""
    fields = _cpuinfo()
    return (fields.get("flags") or fields.get("Features") or "").strip()


def _cpuinfo() -> dict[str, str]:
    """Return the system's description of its last processor; empty if there is none."""
    path = Path("/proc/cpuinfo")
    return _fields(path) if path.exists() else {}


def _fields(path: Path) -> dict[str, str]:
    """Return the lines ``name: value`` of a file."""
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name.strip(): value for name, value in pairs}


# --- processes --------------------------------------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """Return this process's environment for one that imports minillm from where this one did.

    The user's PYTHONPATH comes after.
    """
    places = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def exit_status(code: int) -> str:
    """Return the words for a process's exit code, or for the signal that ended it: " with exit code 1"."""
    return f" of signal {-code}" if code < 0 else f" with exit code {code}"


# --- ctrl-c -----------------------------------------------------------------------------------------------------------


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold KeyboardInterrupt back until the block ends: a half-done step would corrupt the accounting.

    A second ctrl-c inside the block is not held back. Does nothing outside the main thread, and where SIGINT is handled
    otherwise.
    """
    default = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield
        return
    caught = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        caught = True
        signal.signal(signal.SIGINT, default)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if caught:
        raise KeyboardInterrupt


@contextmanager
def no_interrupt_lost() -> Iterator[None]:
    """Let ctrl-c end the block where Python drops it or takes it for another error; also as a decorator.

    The signal may come while a destructor runs, or a callback of a weak reference, as imports have many. Python reports
    an exception of those as one that it ignores, and goes on: the signal is sent again. Or it comes while Python words
    an ImportError, as imports raise many that their modules expect; then a TypeError takes its place (CPython's
    ``PyErr_SetImportError`` without a message, in 3.11 to 3.13 at least).
    """
    report = sys.unraisablehook

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))  # the callback has ended by then
            again.daemon = True
            again.start()
        else:
            report(dropped)

    sys.unraisablehook = hook
    try:
        yield
    except TypeError as error:
        if str(error) == "expected a message argument":
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = report


@contextmanager
def compact_heap() -> Iterator[Callable[[], object]]:
    """Return freed memory to the system meanwhile, where the C library is glibc; yield a function that does it at once.

    Its heap keeps the holes between pieces that stay: 130 to 180 MB of them where a model of 135 million weights is
    packed. Pieces below a megabyte are used again: those that the system gives are filled with zeros first, page by
    page, which takes longer than to compute them. Afterwards the thresholds are those to which they grow by themselves
    (`man mallopt`).
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        yield lambda: None
        return
    trim = partial(libc.malloc_trim, 0)
    libc.mallopt(_MMAP, 1 << 20)
    try:
        yield trim
    finally:
        libc.mallopt(_MMAP, 32 << 20)
        libc.mallopt(_TRIM, 64 << 20)
        trim()


def import_torch() -> None:
    """Import torch with ctrl-c held back: a KeyboardInterrupt inside its C++ initialisers would abort the process.

    Raises UsageError where torch rejects its own environment variables.
    """
    try:
        with deferred_interrupt():
            import torch  # noqa: F401
    except (ValueError, RuntimeError) as error:
        names = sorted(name for name in os.environ if name.startswith(("TORCH", "PYTORCH")))
        if not names:
            raise
        cause = "".join(filter(str.isprintable, str(error).split(",")[0]))[:100]
        raise UsageError(f"torch does not start: {cause}; change or unset {', '.join(names)}") from None
