"""The program ``minillm``, and ``python -m minillm``."""

import sys
from collections import namedtuple


def main() -> int:
    """Run the command line and return the exit code. Ctrl-c during its imports also ends it with one line."""
    try:
        from minillm.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("minillm: stopped\n")
        code = 130
    # If ctrl-c has ended an exec(), such as in a dataclass, CPython would end `python -m minillm` with SIGINT, unless
    # it evaluates text again, as for a named tuple.
    namedtuple("Last", "")
    return code


if __name__ == "__main__":
    sys.exit(main())
