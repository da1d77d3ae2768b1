"""A server of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import Server, served
from support import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    return write_tiny_model(directory)


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Server]:
    with served(tiny, "--num-blocks", "256") as running:
        yield running
    assert running.process.returncode in (0, 130), "".join(running.said)
