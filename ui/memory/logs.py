"""Logs of cache events and of engine steps, one per line, the newest last."""

from collections.abc import Callable, Sequence
from itertools import islice, takewhile

from textual import events
from textual.content import Content

from minillm.outputs import StepReport
from minillm.service.messages import LogEntry
from minillm.text.safe import clean_line
from minillm.ui.drawing import flow
from minillm.ui.memory.line_view import FactsChanged, LineView, Parts
from minillm.ui.memory.pool import Memory
from minillm.ui.numbers import count, plural, spans

KINDS = {
    "a": ("allocate",),
    "f": ("fork",),
    "c": ("copy",),
    "x": ("free", "cut"),
    "h": ("hit",),
    "e": ("evict",),
    "s": ("swap_out", "swap_in", "load"),
    "p": ("preempt",),
}  # kinds of events, by the key that shows and hides them
_KIND_NAMES = {kind for kinds in KINDS.values() for kind in kinds}
_TITLES = {"copy": "copy on write", "swap_out": "swap out", "swap_in": "swap in", "load": "from disk"}
_SHORT_TITLES = {"allocate": "alloc", "swap_out": "swapout", "swap_in": "swap in", "load": "disk"}
_WORDS = {
    "allocate": ("{name} allocates {number}: {where}", "{name} +{where}"),
    "fork": ("{name} shares {number} with {parent}: {where}", "{name} of {parent}"),
    "copy": ("{ends}  {name} writes to a block that {others}", "{ends} {name}, {detail} share"),
    "free": ("{name} frees {number}: {where}", "{name} −{where}"),
    "cut": ("{name} drops wrong draft tokens and frees {number}: {where}", "{name} −{where}"),
    "hit": ("saved {tokens} (blocks {where}) for {name}", "saved {tokens}, {name}"),
    "evict": ("a cached block is evicted: {where}", "cached {where}"),
    "preempt": ("{name} is preempted and frees {number}: {where}", "{name} waits: {number}"),
    "swap_out": ("{name} swaps out {number} to the CPU: {where}", "{name}, {number}"),
    "swap_in": ("{name} swaps in {number} from the CPU: {where}", "{name}, {number}"),
    "load": ("{number} read from disk: {where}", "{number}"),
}  # kind of event -> its text in a wide log, and in a narrow log
_MOST_LINES = 10_000
_SPARE = 1_000  # if the log exceeds the limit by this number of lines, all lines above the limit are removed
_MOST_SPANS = 3
_WIDE = 70  # minimum width in cells for the long wording
_MOST_NAMES = 20_000
_NEAR = 16  # number of previous events to search for the allocation of draft tokens that are dropped
STEP_HEADING = "  step prefill decode     ms "
_WINDOW = 5.0  # rates are averages over the engine steps of this many seconds
_COMPARED = 60  # the longest of this many last steps has a bar of full length
_LEAST_BAR = 2
_LONGEST_BAR = 40


class EventLog(LineView):
    """Shows cache events. Space pauses the log. The letter of a kind of event hides or shows this kind.

    The newest event stays visible unless the user has scrolled up.
    """

    COMPONENT_CLASSES = {*_KIND_NAMES, "time", "text"}  # noqa: RUF012

    follows = True

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.paused = False
        self.hidden: set[str] = set()  # keys of `KINDS`
        self._last: LogEntry | None = None  # the newest event taken from the pool's log
        self._entries: list[LogEntry] = []
        self._owners: dict[int, tuple[str, int]] = {}  # seq_id, even after its end -> owner, completion

    def reset(self) -> None:
        self._last, self._entries = None, []
        self._owners.clear()
        super().reset()

    def learn_owners(self) -> None:
        """Store the owners of sequences, because later events may be about sequences that have ended by then."""
        for table in self.memory.tables:
            if table.owner:
                self._owners[table.seq_id] = (table.owner, table.index)
        while len(self._owners) > _MOST_NAMES:
            del self._owners[next(iter(self._owners))]

    def catch_up(self) -> None:
        """Show the new events, unless paused."""
        fresh = [] if self.paused else self._new_entries()
        if fresh:
            self._last, wanted = fresh[0], self._wanted()
            for entry in reversed(fresh):
                self._add(entry, wanted)
            dropped = len(self._entries) - _MOST_LINES if len(self._entries) > _MOST_LINES + _SPARE else 0
            del self._entries[:dropped]
            self.set_lines(len(self._entries), dropped)

    def _add(self, entry: LogEntry, wanted: set[str]) -> None:
        """Add an event to the list, if its kind is shown.

        If blocks were allocated for draft tokens and freed because the tokens were wrong, neither event is listed.
        """
        if entry.kind == "cut":
            for at in range(len(self._entries) - 1, max(-1, len(self._entries) - 1 - _NEAR), -1):
                taken = self._entries[at]
                if (taken.kind, taken.seq_id, taken.blocks) == ("allocate", entry.seq_id, entry.blocks):
                    del self._entries[at]
                    return
        if entry.kind in wanted:
            self._entries.append(entry)

    def _wanted(self) -> set[str]:
        return {kind for key, kinds in KINDS.items() if key not in self.hidden for kind in kinds}

    def _new_entries(self) -> list[LogEntry]:
        log, last = self.memory.pool.log if self.memory.pool is not None else (), self._last
        return list(takewhile(lambda entry: entry is not last, reversed(log)))

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Return whether the log uses a key itself: Space, the slash, or the letter of a kind of event."""
        return key == "space" or character == "/" or character in KINDS

    def on_key(self, event: events.Key) -> None:
        key = event.character or event.key
        if key in (" ", "space"):
            self.paused = not self.paused
            self.catch_up()
        elif key in KINDS:
            self.hidden ^= {key}
            self._filter()
        elif key == "/":
            # Show all kinds. If all are shown already, hide all, so that the user can then select some.
            self.hidden = set() if self.hidden else set(KINDS)
            self._filter()
        else:
            return
        event.stop()
        event.prevent_default()
        self.post_message(FactsChanged())

    def _filter(self) -> None:
        """Filter the events again after the hidden kinds changed. A paused log stays paused."""
        if self.memory.pool is not None:
            wanted, log = self._wanted(), list(self.memory.pool.log)
            looked_at = log[: len(log) - len(self._new_entries())]
            self._entries = []
            for entry in looked_at:
                self._add(entry, wanted)
            self.set_lines(len(self._entries))

    def line(self, row: int, width: int) -> Parts:
        entry = self._entries[row]
        short = width < _WIDE
        kind = clean_line((_SHORT_TITLES if short else _TITLES).get(entry.kind, entry.kind), 13)
        return [
            (f"{entry.time:>6.1f} ", "time"),
            (f"{kind:<{7 if short else 13}} ", entry.kind if entry.kind in _KIND_NAMES else "text"),
            (event_words(entry, self._who, short=short), "text"),
        ]

    def _who(self, seq_id: int, owner: str = "") -> str:
        owner, index = self._owners.get(seq_id, (owner, 0))
        return self.memory.name(owner, index) if owner else f"sequence {seq_id}"

    def headline(self, width: int, height: int) -> Content:
        pool = self.memory.pool
        if pool is None:
            return Content("no model is loaded")
        words = [plural(pool.num_logged, "event")]
        if (unlogged := pool.num_logged - len(pool.log)) > 0:
            words.append(f"{count(unlogged)} not kept")
        if self.hidden:
            words.append(f"{count(len(self._entries))} match")
        text = Content(" · ".join(words))
        if self.paused:
            new = count(len(self._new_entries()))
            text = Content.assemble(("paused", "$text-warning bold"), f" · {new} new · ", text)
        return text

    def legend(self, width: int, height: int) -> Content:
        """Return the letter of each kind of event: ● is shown, ○ is hidden."""
        items = [
            Content.styled(f"{'○' if key in self.hidden else '●'}{key} {kinds[0].split('_')[0]}", "$dim")
            for key, kinds in KINDS.items()
        ]
        items.append(Content.styled(f"space {'resumes' if self.paused else 'pauses'}", "$dim"))
        return flow(items, width, height)


def event_words(entry: LogEntry, name_of: Callable[[int, str], str], *, short: bool = False) -> str:
    """Return the text of an event. ``name_of`` returns a sequence's name, from its id and its owner."""
    words = {
        "name": name_of(entry.seq_id, entry.owner),
        "parent": "another" if entry.parent_id is None else name_of(entry.parent_id, ""),
        "number": plural(len(entry.blocks), "block"),
        "where": spans(entry.blocks, _MOST_SPANS),
        "detail": count(entry.detail),
        "tokens": plural(entry.detail, "token"),
        "others": "1 other holds" if entry.detail == 1 else f"{count(entry.detail)} others hold",
        "ends": ("→" if short else " → ").join(map(str, entry.blocks)),
    }
    return _WORDS.get(entry.kind, ("{name}: {where}", "{name}: {where}"))[short].format_map(words)


class StepList(LineView):
    """Lists engine steps. Columns: number, prefilled tokens (and chunks), decodes, milliseconds, and a bar of the time.

    The bar is split into the time of the host (▒) and of the device (█). After the bar, ``!`` is followed by the number
    of preempted groups, ``↓`` by the number of blocks swapped out, and ``↑`` by the number of blocks swapped in.
    """

    COMPONENT_CLASSES = {"number", "prefill", "decode", "time", "host", "device", "trouble"}  # noqa: RUF012

    follows = True

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._first = 0  # number of the first step in the list

    def catch_up(self) -> None:
        first = self._steps[0].number if self._steps else 0
        dropped, self._first = max(0, first - self._first) if self._first else 0, first
        self.set_lines(len(self._steps), dropped)

    @property
    def _steps(self) -> Sequence[StepReport]:
        return self.memory.pool.steps if self.memory.pool is not None else ()

    def line(self, row: int, width: int) -> Parts:
        step = self._steps[row]
        chunks = f"{count(step.num_prefill_tokens)}" + (f"/{step.num_prefills}" if step.num_prefills > 1 else "")
        marks = (("!", step.num_preempted), ("↓", step.num_swapped_out), ("↑", step.num_swapped_in))
        trouble = "".join(f" {mark}{number}" for mark, number in marks if number)
        bar_width = max(_LEAST_BAR, min(_LONGEST_BAR, width - len(STEP_HEADING) - len(trouble)))
        host, device = split_bar(step, bar_width, self._longest())
        return [
            (f"{step.number:>6}", "number"),
            (f"{chunks if step.num_prefills else '':>8}", "prefill"),
            (f"{step.num_decodes or '':>7}", "decode"),
            (f"{1000 * step.seconds:>7.1f} ", "time"),
            (host, "host"),
            (device, "device"),
            (trouble, "trouble"),
        ]

    def _longest(self) -> float:
        """Return the duration of the longest recent step in seconds.

        All bars use it as their scale, so that a slow step stands out.
        """
        return max((step.seconds for step in islice(reversed(self._steps), _COMPARED)), default=0.0)

    def headline(self, width: int, height: int) -> Content:
        """Return the rates over the last seconds of work.

        The text has one line if it fits into ``width`` cells, otherwise two lines.
        """
        steps: list[StepReport] = []
        seconds = 0.0
        for step in reversed(self._steps):
            steps.append(step)
            seconds += step.seconds
            if seconds >= _WINDOW:
                break
        if not steps:
            return Content("no step yet")
        seconds = max(seconds, 1e-9)
        decoded = sum(step.num_decodes for step in steps) / seconds
        prefilled = sum(step.num_prefill_tokens for step in steps) / seconds
        device = min(1.0, sum(step.device_seconds for step in steps) / seconds)
        rates = f"{decoded:,.1f} tok/s decoded · {prefilled:,.0f} prefilled"
        split = f"last {seconds:.1f} s: device █ {device:.0%}, host ▒ {1 - device:.0%}"
        return Content(rates + (" · " if len(rates) + len(split) + 3 <= width else "\n") + split)


def split_bar(step: StepReport, width: int, longest: float) -> tuple[str, str]:
    """Return a step's time as a bar of two parts: host and device.

    A step of ``longest`` seconds fills ``width`` cells.
    """
    if step.seconds <= 0:
        return "", ""
    length = max(1, round(width * min(1.0, step.seconds / longest)))
    device = round(length * min(1.0, step.device_seconds / step.seconds))
    return "▒" * (length - device), "█" * device
