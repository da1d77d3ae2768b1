"""The operating system: directories, memory, processor, child processes, and ctrl-c."""

import ctypes
import gc
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

from minillm.errors import UsageError

if TYPE_CHECKING:
    import socket
    import subprocess

_MAX_PATH = 4096  # bytes
_TRIM, _MMAP = -1, -3  # glibc's M_TRIM_THRESHOLD (free memory kept at the heap's end) and M_MMAP_THRESHOLD

# --- directories ------------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Return the directory of downloads: ``$MINILLM_CACHE``, or the user's cache directory. It may not exist yet."""
    return _directory("cache", "MINILLM_CACHE")


def config_dir() -> Path:
    """Return the directory of config.toml: ``$MINILLM_CONFIG``, or the user's configuration directory."""
    return _directory("config", "MINILLM_CONFIG")


def data_dir() -> Path:
    """Return the directory of conversations: ``$MINILLM_DATA``, or the user's data directory."""
    return _directory("data", "MINILLM_DATA")


def expanded(path: str, where: str) -> Path:
    """Return a path with ``~`` replaced by the home directory. ``where``: the origin of ``path``, for the error.

    Raises:
        UsageError: the path is invalid, or its user has no home directory.
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
    """Return the available and the total bytes of memory, of the machine or of this process's container."""
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
    """Return the bytes of memory that a process has now; 0 if unknown. ``process``: its id, by default this process."""
    statm = Path(f"/proc/{process or 'self'}/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def processor() -> str:
    """Return the processor's name, or its architecture if the system does not know the name."""
    return _cpuinfo().get("model name", "").strip() or platform.processor() or platform.machine()


def processor_features() -> str:
    """Return the processor's instruction set extensions, separated by spaces; empty if they are unknown."""
    fields = _cpuinfo()
    return (fields.get("flags") or fields.get("Features") or "").strip()


def _cpuinfo() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the last processor, by name; empty if the file does not exist."""
    path = Path("/proc/cpuinfo")
    return _fields(path) if path.exists() else {}


def _fields(path: Path) -> dict[str, str]:
    """Return the values of a file's ``name: value`` lines, by name. The last line of a name counts."""
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name.strip(): value for name, value in pairs}


# --- processes --------------------------------------------------------------------------------------------------------

# -P: a module of the current directory must not replace one of the standard library.
PYTHON = (sys.executable, "-P")  # runs modules in child processes


def child_environment() -> dict[str, str]:
    """Return the environment for a child process that must import minillm from the same place as this process.

    That place comes first in PYTHONPATH, before the user's own entries.
    """
    places = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def start_connected(
    command: Iterable[str], environment: Mapping[str, str] = {}, log: "int | BinaryIO" = 2
) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """Start ``command NUMBER`` as a child process without the terminal's ctrl-c. Raises OSError if that fails.

    Return a socket to the process, and the process. NUMBER is the file descriptor of its end of the socket. Its stdout
    and stderr go to ``log``, by default this process's stderr. ``environment``: variables to add.
    """
    import socket  # not at the top: ``minillm --help`` imports this file
    import subprocess

    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            (*command, str(theirs.fileno())),
            env={**child_environment(), **environment},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return ours, process


def parent_socket() -> "socket.socket":
    """Return the socket to the process that has started this process with `start_connected`."""
    import socket

    connection = socket.socket(fileno=int(sys.argv[-1]))
    connection.set_inheritable(False)  # a child process that held it open would hide the end of this process
    return connection


def end_with_parent(parent: int | None = None) -> None:
    """Start a thread that kills this process's group when the process ``parent`` has ended.

    ``parent`` is the process id of this process's parent; None: look it up now. The thread checks twice a second.
    """
    parent = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def exit_status(code: int) -> str:
    """Return words that end a message about an ended process, such as " with exit code 1" or " of signal 9"."""
    return f" of signal {-code}" if code < 0 else f" with exit code {code}"


# --- ctrl-c -----------------------------------------------------------------------------------------------------------


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer KeyboardInterrupt until the block ends, because an interrupted step would corrupt the bookkeeping.

    A second ctrl-c inside the block is not deferred. Does nothing outside the main thread, or if the program has its
    own handler of SIGINT.
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
def keep_interrupts() -> Iterator[None]:
    """Let ctrl-c end the block even where Python would lose the KeyboardInterrupt. Also works as a decorator.

    Python loses a KeyboardInterrupt in three cases, which are common during imports:

    - The interrupt is raised in a destructor or a weak reference callback, where Python ignores exceptions. SIGINT is
      then sent again.
    - The interrupt is raised while Python builds an ImportError. A TypeError then takes its place, at least in Python
      3.11 to 3.13 (``PyErr_SetImportError`` without a message).
    - The interrupt is raised in a ``__set_name__``, such as that of a dataclass's field. Python 3.11 raises a
      RuntimeError from it.

    These errors are converted back to a KeyboardInterrupt.
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
    except (TypeError, RuntimeError) as error:
        if str(error) == "expected a message argument" or isinstance(error.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = report


@contextmanager
def compact_heap() -> Iterator[Callable[[], object]]:
    """Make glibc return the memory of large freed allocations to the system inside the ``with``.

    Yield a function that also returns free memory of the heap, at once. Without this context manager, glibc's heap
    keeps the gaps between live allocations: 130 to 180 MB when a model of 135 million weights is packed.

    Allocations below 1 MB still come from the heap. The system would have to zero fresh memory for them page by page,
    which takes longer than computing on it. After the ``with``, glibc keeps freed memory again, up to the maximum
    thresholds that it would reach by itself (`man mallopt`). Without glibc, nothing changes.
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


@contextmanager
def _of_long_life() -> Iterator[None]:
    """Do not collect garbage, and exclude from later collections all objects that exist at the end."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def import_torch() -> None:
    """Import torch with ctrl-c deferred: a KeyboardInterrupt inside its C++ initializers would abort the process.

    The 180,000 objects that this creates live as long as the process, so garbage is never searched among them.
    Otherwise the search would take a seventh of the time of the import, and 0.2 s now and then later.

    Raises UsageError if torch rejects its own environment variables.
    """
    if "torch" in sys.modules:
        return
    try:
        with deferred_interrupt(), _of_long_life():
            import torch  # noqa: F401
    except (ValueError, RuntimeError) as error:
        names = sorted(name for name in os.environ if name.startswith(("TORCH", "PYTORCH")))
        if not names:
            raise
        cause = "".join(filter(str.isprintable, str(error).split(",")[0]))[:100]
        raise UsageError(f"torch does not start: {cause}; change or unset {', '.join(names)}") from None
