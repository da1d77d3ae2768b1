"""The process of `minillm.loading.compiling`: compiles one layer. It reads ``{"shape": …, "path": …}`` from stdin."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from minillm.model.one_token import LayerShape, compile_layer


def _end_with(parent: int) -> None:
    """End this process and its compilers when the parent process has died."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    if os.getsid(0) == os.getpid():
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request = json.load(sys.stdin)
    shape = request["shape"]
    compile_layer(LayerShape(**{**shape, "biases": tuple(shape["biases"])}), Path(request["path"]))


if __name__ == "__main__":
    main()
