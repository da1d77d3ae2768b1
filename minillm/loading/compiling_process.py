"""The process of `minillm.loading.compiling`: compiles one layer. It reads ``{"shape": …, "path": …}`` from stdin."""

import json
import os
import sys
from pathlib import Path

from minillm.model.one_token import LayerShape, compile_layer
from minillm.system import end_with_parent


def main() -> None:
    if os.getsid(0) == os.getpid():
        end_with_parent()
    request = json.load(sys.stdin)
    shape = request["shape"]
    compile_layer(LayerShape(**{**shape, "biases": tuple(shape["biases"])}), Path(request["path"]))


if __name__ == "__main__":
    main()
