"""Run the chat app, and check its bookkeeping and its files twice a second.

Arguments: the log, the model ("fake": the scripted engine), "resume" to go on with the latest conversation. A line of
the log is a `Look` as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib.programs import state_dump
from minillm.cli.main import main
from minillm.errors import MinillmError
from minillm.system import resident_bytes
from minillm.ui import app as chat_app
from minillm.ui.chat.conversation import Answer, Conversation
from minillm.ui.chat.saved import from_data, to_data
from minillm.ui.chat.sessions import SessionStore
from minillm.ui.memory.pool import Pool
from minillm.ui.settings import Settings

HERE = Path(__file__).parent
ENGINES = {name: (sys.executable, str(HERE / f"{name}_engine.py")) for name in ("fake", "checked")}
SMALL = {"device": "cpu", "num_blocks": 60, "admission": "optimistic"}


@dataclass
class Look:
    """A record of the app: ``said`` are the ended answers, as (question, texts); ``holders`` own blocks."""

    conversation: str
    said: list[tuple[str, list[str]]]
    phase: str
    busy: bool
    holders: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    megabytes: float = 0.0  # of the app


def texts(answer: Answer) -> list[str]:
    return [answer.text, *(candidate.text for candidate in answer.candidates)]


def ended(conversation: Conversation) -> list[tuple[str, list[str]]]:
    return [(turn.question, texts(turn.answer)) for turn in conversation.all_turns() if not turn.answer.is_open]


def book_problems(pool: Pool) -> list[str]:
    """Return the contradictions between the app's picture of the pool and its block tables."""
    held = Counter(b for table in pool.tables.values() if table.state != "swapped" for b in table.blocks)
    wrong = [block for block in range(pool.num_blocks) if pool.ref_counts[block] != held[block]]
    problems = [f"blocks {wrong} are counted otherwise than the tables hold them"] if wrong else []
    if len(held) != pool.used_blocks:
        problems.append(f"{pool.used_blocks} blocks are said to be used, and {len(held)} are held")
    return problems


class Watched(chat_app.ChatApp):
    """The app, which records its state in the conversation's own task, where no change is half done."""

    seen = Path()
    last_seen = ""

    async def on_mount(self) -> None:
        self.set_interval(0.5, lambda: self.chat.chat_pane.call_later(self._look))

    def _look(self) -> None:
        pane, pool = self.chat.chat_pane, self.chat.pool
        busy = pane.run is not None or pane.compaction is not None
        conversation = pane.conversation
        look = Look(conversation.conversation_id, ended(conversation), self.engine_state.phase, busy)
        look.megabytes = resident_bytes(os.getpid()) / 1e6
        if pool is not None:
            look.holders = sorted({table.owner for table in pool.tables.values() if table.blocks})
            look.problems += book_problems(pool)
        if self.engine_state.phase == "crashed" and "signal 9" not in self.engine_state.error:
            look.problems.append(self.engine_state.error)
        look.problems += self._lost(conversation, busy)
        if (line := json.dumps(asdict(look))) != self.last_seen:
            self.last_seen = line
            with self.seen.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def _lost(self, conversation: Conversation, busy: bool) -> list[str]:
        """Return the differences between the conversation and its file."""
        path = self.chat.chat_pane.store.path_of(conversation)
        if not conversation.first or path in DELETED:
            return []
        try:
            saved = self.chat.chat_pane.store.load(path)
        except MinillmError as error:
            return [str(error)]
        shown = from_data(json.loads(json.dumps(to_data(conversation))))  # as it will be read
        if not busy and to_data(saved) != to_data(shown):
            return [f"on disk is {to_data(saved)}, and shown is {to_data(shown)}"]
        kept = ended(saved)
        missing = [each for each in ended(conversation) if each not in kept]
        return [f"not on disk: {missing}"] if missing else []


DELETED: set[Path] = set()


class Store(SessionStore):
    """Notes what its user deletes."""

    def save(self, conversation: Conversation) -> bool:
        is_copy = super().save(conversation)
        DELETED.discard(self.path_of(conversation))
        return is_copy

    def delete(self, path: Path) -> str:
        DELETED.add(path)
        return super().delete(path)


def run() -> int:
    log, model, how = sys.argv[1:4]
    os.chdir(Path(log).parent)
    store = Store.of_user()
    resumed = None
    if how == "resume" and (found := store.list()):
        resumed = store.load(found[0].path)
    engine = {} if model == "fake" else SMALL
    app = Watched(
        Settings(model, engine=engine),
        store,
        resumed,
        engine_command=ENGINES["fake" if model == "fake" else "checked"],
    )
    app.seen = Path(log)
    return state_dump.run(app)


if __name__ == "__main__":
    import minillm.cli.chat as command

    command.chat = lambda arguments: run()
    sys.exit(main(["chat"]))
