"""Compute one layer of each kind instead of all layers, where only the kernels and the memory of a step matter.

Layers of the same kind launch the same kernels and need the same memory.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


class _Mode(threading.local):
    skips = False


_mode = _Mode()


@contextmanager
def one_layer_of_each_kind() -> Iterator[None]:
    """Let models skip layers in this thread, if another layer of the same kind runs. Results are then meaningless."""
    before, _mode.skips = _mode.skips, True
    try:
        yield
    finally:
        _mode.skips = before


def to_compute(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> Iterable[Item]:
    """Return ``items``, such as layers. Inside `one_layer_of_each_kind`, return only one item of each kind."""
    return {kind(item): item for item in items}.values() if _mode.skips else items
