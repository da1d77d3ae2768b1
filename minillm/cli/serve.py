"""``minillm serve``: serve a model over HTTP to clients of OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.cli.options import given
from minillm.config import EngineConfig
from minillm.errors import UsageError
from minillm.parallel.launch import Torchrun
from minillm.progress import loading_bar, say
from minillm.server.http.rules import AccessRules
from minillm.service.process import start_engine
from minillm.system import expanded
from minillm.text.safe import cause, clean_line
from minillm.user_config import read_config

if TYPE_CHECKING:
    from minillm.server.client import LoadingEvent
    from minillm.server.service import Service

_VARIABLE = "MINILLM_API_KEY"
_SHORTEST_KEY = 8
_MAX_REPLICAS = 64


def run(arguments: argparse.Namespace) -> int:
    """Serve a model until ctrl-c."""
    if arguments.api_key is not None:
        _check_key(arguments.api_key)  # an empty one would not be noticed in the environment
        _hide_key(arguments.api_key)
    config = read_config(arguments.config)
    model = config.choose_model(arguments.name or arguments.model)
    options = {**config.engine, **given(arguments, EngineConfig)}
    EngineConfig(**options)
    rules = access_rules(arguments, os.environ.pop(_VARIABLE, ""))  # the engines do not need the key
    torchrun = Torchrun.from_environment()
    replicas = _num_replicas(torchrun, arguments.replicas, options.get("tensor_parallel_size", 1))
    if torchrun is not None and torchrun.rank:
        return 0  # the process of rank 0 runs the server and its engines
    # The engines import torch during the imports of this process. They end with this process if it fails below.
    processes = [start_engine(number, replicas, options) for number in range(replicas)]
    from minillm.server.serving import ServerConfig, serve
    from minillm.service.messages import Load, Loading, Notice

    names = tuple(arguments.served_model_name or ())
    server = ServerConfig(arguments.host, arguments.port, rules, names, arguments.max_waiting, arguments.grace)
    with ExitStack() as bar:
        report = bar.enter_context(loading_bar())

        def on_loading(event: LoadingEvent) -> None:
            if isinstance(event, Loading):
                report(event.progress)
            elif isinstance(event, Notice):
                say(event.text)

        def opened(address: str, service: Service) -> None:
            bar.close()
            facts = service.facts
            pool = f"{facts.num_blocks * facts.block_size:,} tokens of cache"
            keys = ", with keys" if rules.keys else ""
            pool += f" in each of {replicas} replicas" if replicas > 1 else ""
            say(f"{service.names[0]} on {facts.device} ({facts.dtype}, {pool}) at {address}/v1{keys}; ctrl-c ends it")

        asyncio.run(serve(server, processes, Load(model, options, arguments.wait_warm), on_loading, opened))
    return 0


def access_rules(arguments: argparse.Namespace, key: str) -> AccessRules:
    """Return the rules that requests must follow. Raises UsageError if any option of the server is invalid.

    Args:
        key: the API key from the environment; empty: none.
    """
    bounds = {"port": (0, 65535), "max_waiting": (1, 1 << 20), "max_body": (1024, 1 << 31), "grace": (0, 3600)}
    for name, (low, high) in bounds.items():
        value = getattr(arguments, name)
        if not low <= value <= high:
            raise UsageError(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")
    if not all(arguments.served_model_name or ()):
        raise UsageError("--served-model-name is empty; give the name that clients send, or leave it out")
    keys = _keys(key, arguments.api_key_file)
    host = arguments.host
    if not _is_local(host) and not keys:
        raise UsageError(
            f"--host {host} lets other machines in: give a key as well ({_VARIABLE}, --api-key-file or --api-key)"
        )
    hosts = ("127.0.0.1", "localhost", "::1", host.lower(), *(name.lower() for name in arguments.allowed_host or ()))
    if not _is_local(host) and not arguments.allowed_host:
        hosts = ()  # accept every Host header: this machine's names are unknown, and web pages do not have the key
    if "*" in (arguments.allow_origin or ()):
        raise UsageError("--allow-origin: name each origin, like https://example.org; '*' would let every web page in")
    return AccessRules(keys, hosts, tuple(arguments.allow_origin or ()), arguments.max_body)


def _num_replicas(torchrun: Torchrun | None, asked: int | None, tensor_parallel_size: int) -> int:
    """Return the number of engines: the option ``--replicas`` (``asked``), or the number of torchrun's processes.

    Raises UsageError if the option is out of range, or differs from torchrun's number.
    """
    if asked is not None and not 1 <= asked <= _MAX_REPLICAS:
        raise UsageError(f"--replicas must be from 1 to {_MAX_REPLICAS}, not {asked}")
    if torchrun is None:
        return asked or 1
    count = torchrun.num_replicas(tensor_parallel_size)
    if asked not in (None, count):
        raise UsageError(f"--replicas {asked}: torchrun has started processes for {count}; leave the option out")
    return count


def _keys(key: str, file: str | None) -> Mapping[str, str]:
    """Return a dictionary: API key -> name of its owner.

    Raises UsageError if a key is invalid.

    Args:
        key: the key from the environment, or empty.
        file: the path of a file with lines ``name: key`` or ``key``, or None.
    """
    found = {key: "key"} if key else {}
    if file is not None:
        path = expanded(file, "--api-key-file")
        for number, line in enumerate(_lines(path), 1):
            name, colon, value = line.rpartition(":")
            found[value.strip()] = name.strip() if colon else f"key {number}"
    for each in found:
        _check_key(each)
    return found


def _check_key(key: str) -> None:
    if len(key) < _SHORTEST_KEY or not key.isascii() or any(c.isspace() for c in key):
        raise UsageError(f"an API key needs at least {_SHORTEST_KEY} ASCII characters, and no spaces")


def _lines(path: Path) -> list[str]:
    try:
        text, mode = path.read_text(encoding="utf-8-sig"), path.stat().st_mode
    except (OSError, ValueError) as error:
        raise UsageError(f"--api-key-file {path}: {cause(error)}") from None
    if mode & 0o022:
        say(f"--api-key-file {clean_line(str(path))}: other users can change the keys; run `chmod 600` on it")
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise UsageError(f"--api-key-file {path}: it contains no key")
    return lines


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hide_key(key: str) -> None:
    """Restart this program with the API key in its environment.

    The key must not stay in the command line's arguments, because all users of this machine can read these.
    """
    words, left = [], list(sys.orig_argv)
    while left:
        word = left.pop(0)
        if word == "--api-key":
            left[:1] = []
        elif not word.startswith("--api-key="):
            words.append(word)
    os.execve(sys.executable, [sys.executable, *words[1:]], {**os.environ, _VARIABLE: key})
