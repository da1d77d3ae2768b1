"""The process of `minillm.runner.compiling`: compiles one layer. It reads ``{"shape": …, "path": …}`` from stdin."""

import json
import sys
from pathlib import Path

from minillm.model.one_token import LayerShape, compile_layer


def main() -> None:
    request = json.load(sys.stdin)
    shape = request["shape"]
    compile_layer(LayerShape(**{**shape, "biases": tuple(shape["biases"])}), Path(request["path"]))


if __name__ == "__main__":
    main()
