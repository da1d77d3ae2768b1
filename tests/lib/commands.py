"""Run the commands of pages: in bash, on tiny models that have the names of real ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lib.server import FORKING, served
from minillm.system import cache_dir
from minillm.weights.manifest import load_manifest

HUB_MODEL = "Qwen/Qwen3-0.6B"  # the repository that pages name
_PATIENCE = 120  # seconds for a command
_SERVE = "minillm serve"
_ADDRESS = re.compile(r"(http://)?\b(localhost|127\.0\.0\.1):8000\b")


def _write_models(home: Path, tiny: Path) -> None:
    """Fill the cache directories: ``cache``, which commands without shown output use, and ``real``.

    In ``cache`` the tiny model is recorded as downloaded under the name of each model but the default one. That one is
    linked in both.
    """
    manifest = load_manifest()
    default = cache_dir() / "models" / manifest.default
    for name in ("cache", "real"):
        (home / name / "models").mkdir(parents=True)
        if default.exists():
            (home / name / "models" / manifest.default).symlink_to(default)
    paths = sorted(tiny.iterdir())
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    files = [
        {"name": path.name, "size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    ]
    names = [form.name for entry in manifest.models.values() for form in entry.all_forms()]
    for name in {*names, HUB_MODEL} - {manifest.default}:
        model = home / "cache/models" / name.replace("/", "--")
        model.mkdir()
        for path in paths:
            (model / path.name).symlink_to(path)
        (model / "minillm.json").write_text(json.dumps({"source": "a test", "files": files}))


@dataclass
class Shell:
    """A shell for commands. ``home`` holds models and programs; commands run in a new directory for each page."""

    home: Path
    root: Path
    tiny: Path
    directory: Path
    environment: dict[str, str]
    exported: dict[str, str] = field(default_factory=dict)
    servers: ExitStack = field(default_factory=ExitStack)
    url: str = ""

    @classmethod
    @contextmanager
    def made(cls, home: Path, root: Path, tiny: Path) -> Iterator[Shell]:
        """Yield a shell. Its `minillm` is a running process that waits for commands."""
        (home / "bin").mkdir()
        _write_models(home, tiny)
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(home),
            "MINILLM_CACHE": str(home / "cache"),
            "NO_PROXY": "localhost,127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        (home / "bin/minillm").symlink_to(FORKING[0]("minillm"))
        yield cls(home, root, tiny, home, environment)

    @contextmanager
    def page(self) -> Iterator[Path]:
        """Yield a new directory to run a page's commands in. The page's server is stopped at the end."""
        self.directory, self.exported, self.url = self.home / "page", {}, ""
        self.directory.mkdir()
        for path in self.root.iterdir():
            if not path.name.startswith("."):
                (self.directory / path.name).symlink_to(path)
        shutil.copytree(self.root / "tests/docs/files", self.directory, dirs_exist_ok=True)
        try:
            with ExitStack() as self.servers:
                yield self.directory
        finally:
            shutil.rmtree(self.directory)

    def run(self, command: str, where: str, *, real: bool = False) -> str:
        """Run a command; it must end with exit code 0. Returns its output, stdout and stderr.

        Args:
            where: file and line, for messages.
            real: the default model is the real one, and no other is downloaded.
        """
        if command.startswith(_SERVE):
            self._serve(shlex.split(command)[2:])
            return ""
        if exported := re.fullmatch(r"export (\w+)=(.*)", command):
            self.exported[exported[1]] = " ".join(shlex.split(exported[2]))
            return ""
        environment = {**self.environment, **self.exported}
        if real:
            environment["MINILLM_CACHE"] = str(self.home / "real")
        else:
            environment["MINILLM_MODEL"] = str(self.tiny)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", self.reachable(command)],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            check=False,
        )
        output = done.stdout.decode(errors="replace")
        assert done.returncode == 0, f"{where}: {command} ended with exit code {done.returncode}:\n{output}"
        return output

    def reachable(self, text: str) -> str:
        """Return the text with the address of the page's server in place of port 8000."""
        return (
            _ADDRESS.sub(lambda found: self.url.removeprefix("" if found[1] else "http://"), text) if self.url else text
        )

    def _serve(self, words: list[str]) -> None:
        """Serve until the next server, or the page's end."""
        self.servers.close()
        model = words.pop(0) if words and not words[0].startswith("-") else load_manifest().default
        environment = {"MINILLM_CACHE": self.environment["MINILLM_CACHE"], **self.exported}
        options = [str(self.directory / word) if (self.directory / word).is_file() else word for word in words]
        self.url = self.servers.enter_context(served(Path(model), *options, environment=environment)).url
