"""The server's engine process: reads calls from stdin, writes events to stdout, and runs engine steps in between.

Run it as ``python -m minillm.server``. The process ends when stdin closes, so it never outlives the HTTP process.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from minillm.errors import MinillmError
from minillm.service import call_messages as messages
from minillm.service import messages as chat


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process handles ctrl-c
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a stray print must not reach the HTTP process as an event
    lock = threading.Lock()

    def send(event: messages.Event) -> None:
        data = messages.encode(event)
        with lock:
            try:
                written = 0
                while written < len(data):
                    written += events.write(data[written:]) or 0
            except BrokenPipeError:
                os._exit(0)

    first = messages.read_call(sys.stdin.buffer)
    if not isinstance(first, messages.Load):
        return 0
    try:
        _serve(first, send)
    except MinillmError as error:
        send(messages.Telling(chat.LoadFailed(str(error), error.exit_code)))
        return error.exit_code
    return 0


def _serve(load: messages.Load, send: Callable[[messages.Event], None]) -> None:
    """Load the model. Then carry out calls and run engine steps until stdin ends."""
    began = time.monotonic()
    from minillm.config import EngineConfig
    from minillm.engine.driver import Driver
    from minillm.loading.device import choose_device
    from minillm.loading.engine import best_form, load_engine
    from minillm.loading.gpu_stacks import keep_small
    from minillm.service.calls import CallDispatcher
    from minillm.service.engine_requests import EngineRequests
    from minillm.service.facts import loaded
    from minillm.service.sessions import Sessions

    config = EngineConfig(**load.options)

    def progress(done: object) -> None:
        send(messages.Telling(chat.Loading(done)))  # type: ignore[arg-type]

    def notice(text: str) -> None:
        send(messages.Telling(chat.Notice(text)))

    name = best_form(load.model, config, progress, notice)
    keep_small(choose_device(config), config)
    engine = load_engine(name, config, progress, notice)
    driver = Driver(engine)
    requests = EngineRequests(driver, send)
    sessions = Sessions(driver, requests, send)
    requests.others = sessions.owners
    calls = CallDispatcher(driver, requests, sessions, send)
    threading.Thread(target=calls.read, args=(sys.stdin.buffer,), daemon=True).start()
    facts = loaded(engine, name, time.monotonic() - began)
    sizes = (engine.scheduler.max_num_seqs, engine.runner.model.config.vocab_size)
    template = "" if engine.tokenizer is None else engine.tokenizer.chat_template
    send(messages.Ready(facts, *sizes, defaults=dict(engine.defaults), chat_template=template))
    if template:
        calls.begin_templates()
    while True:
        while not (engine.has_work and calls.jobs.empty()):
            while calls.jobs.empty() and engine.runner.prepare_ahead():
                pass
            job = calls.jobs.get()
            if job is None:
                return
            job()
            if calls.jobs.empty():
                requests.report()
        sessions.take(*requests.step())
        idle = not engine.has_work
        requests.report(now=idle)
        sessions.report(now=idle)


if __name__ == "__main__":
    sys.exit(main())
