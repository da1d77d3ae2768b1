"""The process of a `minillm.text.sandbox`: takes a request a line as JSON, and answers each with one.

Run as a script with another script, whose ``answer`` makes an answer of a request, and with a number of bytes. Neither
imports anything of minillm. The address space is limited here, and the parent kills a process that takes too long.
"""

import json
import resource
import runpy
import signal
import sys


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answer, memory = runpy.run_path(sys.argv[1])["answer"], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        request = json.loads(line)
        # Where the parent is gone, this signal ends an answer that takes too long.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 1)
        try:
            result = answer(request)
        except MemoryError:
            result = {"broken": "it takes too much memory"}
        except BaseException as error:  # where a library panics it is not even an Exception
            result = {"broken": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
