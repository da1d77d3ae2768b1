"""``minillm rm``: delete downloaded models."""

from __future__ import annotations

import argparse

from minillm.progress import size
from minillm.weights.files import remove


def run(arguments: argparse.Namespace) -> int:
    for name in arguments.downloaded:
        print(f"{name} is deleted: {size(remove(name))} are free again")
    return 0
