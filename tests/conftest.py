"""Settings and fixtures of the whole suite."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import ssl
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

from minillm.system import config_dir, data_dir

if TYPE_CHECKING:
    from lib.server import Server
    from minillm import LLM

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
# A worker soon holds a million objects. To look for garbage among them took a tenth of the time of the chat's tests.
gc.set_threshold(50_000, 20, 50)
if not torch.cuda.is_available():
    # Before anything imports triton: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("ci"), max_examples=25)

_BEGAN = pytest.StashKey[float]()


def processor_seconds() -> float:
    """Return the processor time of this process and of its ended children."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEGAN] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if call.when == "teardown":
        report.user_properties.append(("processor seconds", processor_seconds() - item.stash[_BEGAN]))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With ``--durations``, print the time of each folder of tests, also with several workers."""
    if not terminalreporter.config.option.durations:
        return
    folders: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for report in (each for found in terminalreporter.stats.values() for each in found):
        if isinstance(report, pytest.TestReport):
            path = report.nodeid.partition("::")[0].split("/")[1:-1]
            sums = folders["/".join(path[:2]) or "."]
            sums[0] += sum(float(str(value)) for name, value in report.user_properties if name == "processor seconds")
            sums[1] += report.duration
            sums[2] += report.when == "call"
    terminalreporter.section("seconds by folder")
    terminalreporter.write_line("processor    clock  tests")
    for name, (processor, clock, count) in sorted(folders.items(), key=lambda each: -each[1][0]):
        terminalreporter.write_line(f"{processor:9.1f}{clock:9.1f}{count:7.0f}  {name}")


_FORKING = pytest.StashKey[ExitStack]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the workers, and the commands of their tests, from processes that import all modules once.

    CUDA does not work in forks of a process that has initialized it. With a GPU, workers start as usual.
    """
    if torch.cuda.is_available():
        return
    from lib.programs import warm

    stack = config.stash[_FORKING] = ExitStack()
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forking-")))
    stack.enter_context(
        warm.forking(directory, "scripted", "torch", "minillm", "worker", options=config.invocation_params.args)
    )
    stack.enter_context(warm.forking(directory, "chat"))
    for spec in specs:
        spec.python = str(warm.program(directory, "worker"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if _FORKING in node.config.stash:
        node.workerinput["forking"] = str(Path(node.gateway.spec.python).parent)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FORKING in config.stash:
        config.stash[_FORKING].close()


def listing(*directories: Path) -> set[tuple[str, int]]:
    """List every file below these directories, with the time of its last change."""
    files = [path for directory in directories for path in directory.rglob("*") if path.is_file()]
    return {(str(path), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_the_users() -> Iterator[None]:
    """Tests, and the processes that they start, have directories of their own, which are removed at the end."""
    # A machine without platformdirs has no directories of the user's, unless the environment names them.
    of_user = (data_dir(), config_dir()) if importlib.util.find_spec("platformdirs") else ()
    before = listing(*of_user)
    tempfile.gettempdir()  # pytest's own directories stay where they are
    with (
        tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as own,
        pytest.MonkeyPatch.context() as patch,
    ):
        for variable in ("MINILLM_DATA", "MINILLM_CONFIG", "MINILLM_DISK_CACHE", "TMPDIR"):
            directory = Path(own) / variable.lower()
            directory.mkdir()
            patch.setenv(variable, str(directory))
        yield
        left = [path.name for path in (Path(own) / "tmpdir").glob("minillm-*")]
    assert not left, "a process that a test started has left its temporary directory behind"
    written = {path for path, _ in listing(*of_user) ^ before}
    assert not written, "tests have changed files of the user's (or somebody chatted meanwhile)"


@pytest.fixture(scope="session", autouse=True)
def _the_interpreter_does_nothing_twice() -> Iterator[None]:
    from lib.interpreter import nothing_twice

    with nothing_twice():
        yield


@pytest.fixture(scope="session", autouse=True)
def _textual_is_quick() -> Iterator[None]:
    from lib.quick_textual import quick

    with quick():
        yield


@pytest.fixture(scope="session")
def forking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function that starts a process of a kind of `lib.programs.warm`, and returns a program that asks it.

    The workers of pytest-xdist share these processes.
    """
    from lib.programs import warm

    shared = getattr(request.config, "workerinput", {}).get("forking")
    with ExitStack() as stack:

        @functools.cache
        def program(kind: str) -> str:
            directory = Path(shared or tmp_path_factory.mktemp("forking"))
            if not shared:
                stack.enter_context(warm.forking(directory, kind))
            return str(warm.program(directory, kind))

        yield program


@pytest.fixture(scope="session", autouse=True)
def _engines_and_servers_fork(forking: Callable[[str], str]) -> None:
    if ui := sys.modules.get("lib.ui"):
        ui.FAKE[:] = [forking("scripted")]
    if server := sys.modules.get("lib.server"):
        server.FORKING[:] = [forking]
    if terminal := sys.modules.get("lib.terminal"):
        terminal.FORKING[:] = [forking]


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Read the certificates once. httpx reads them for each client, which is slow, and no test uses TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True)
def _drawn_again_alike(request: pytest.FixtureRequest) -> None:
    """Random tensors are a test's own, and the same every time: a test that fails fails again."""
    seed = zlib.crc32(request.node.nodeid.encode())
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # `torch.manual_seed` also remembers its caller's stack, for devices that could appear later: 2 ms
        torch.default_generator.manual_seed(seed)


@pytest.fixture
def own_garbage() -> Iterator[None]:
    """Let `gc.collect` look at the test's own objects alone. Among those of all earlier tests it takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small random chat model: fast, and nonsense."""
    from lib.models import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def minillm_command(forking: Callable[[str], str]) -> tuple[str, ...]:
    """Return a command that runs ``minillm``, without the seconds that importing torch takes. It passes SIGINT on."""
    return (forking("minillm"),)


@pytest.fixture
def compiling(forking: Callable[[str], str], tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a Python file, or code after ``-c``, and returns its output. Kernels are compiled."""

    def run(*arguments: object, **variables: str) -> str:
        own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        command = [forking("torch"), *map(str, arguments)]
        environment = {**os.environ, **own, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.stdout, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def engine_command(minillm_command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command that runs an engine process for a chat app, as quickly."""
    return *minillm_command, "-P", "-m", "minillm.service"


@pytest.fixture
def modules_fork(minillm_command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the engines and ranks that a test starts."""
    monkeypatch.setattr("minillm.system.PYTHON", (*minillm_command, "-P"))


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The real default model, float32 on the CPU."""
    from minillm import LLM

    return LLM("smollm2-135m", device="cpu", dtype="float32", num_blocks=1024)


@pytest.fixture(scope="session")
def theirs() -> Any:
    """The same weights in transformers."""
    from lib.models import default_model_of_transformers

    return default_model_of_transformers()


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of tests marked ``anyio``: Textual knows no other."""
    return "asyncio"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lib.models import write_tiny_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    return write_tiny_model(directory)


@pytest.fixture(scope="session")
def of_long_answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return such a model with a context of 16,384 tokens. A long answer runs until a test acts, on any machine."""
    from lib.models import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("long"), max_positions=16_384)


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Server]:
    from lib.server import served

    with served(tiny, "--num-blocks", "256") as running:
        yield running
    assert running.process.returncode in (0, 130), "".join(running.said)
