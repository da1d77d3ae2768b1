"""The figures view: memory over time, by kind of block; the savings by paging and sharing; and counts of events."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from minillm.progress import size
from minillm.service.messages import MemoryUse
from minillm.ui.memory.line_view import LineView, Parts
from minillm.ui.memory.pool import Memory, Pool, PoolFigures
from minillm.ui.numbers import bar, count, plural, sparkline

_SIDE_BY_SIDE = 76  # minimum width in cells for two halves side by side
_LEAST_DRAWN = 16  # the full height of the chart stands for at least this number of blocks
_WIDE_HALF = 42
_LEAST_CHART = 4  # minimum height of the chart in lines
_CHART = (
    ("used", "o", "own"),
    ("shared", "s", "shared"),
    ("waste", "~", "waste"),
    ("cached", "c", "cached"),
    ("free", "·", "free"),
)  # kinds of blocks in the chart, from bottom to top: component class, letter, meaning


class MemoryFigures(LineView):
    """Shows figures about the block pool and the device's memory. If the view is wide, the figures are in two columns.

    A chart of the whole pool is below the figures if there is space for it.
    """

    COMPONENT_CLASSES = {"label", "figure", "used", "shared", "cached", "free", "waste", "without"}  # noqa: RUF012

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._lines: list[Parts] = []

    def catch_up(self) -> None:
        region, pool = self.scrollable_content_region, self.memory.pool
        self._lines = memory_lines(pool, region.width, region.height) if pool is not None else []
        self.set_lines(len(self._lines))

    def on_resize(self) -> None:
        self.catch_up()
        self.refresh()

    def line(self, row: int, width: int) -> Parts:
        return self._lines[row]


def memory_lines(pool: Pool, width: int, height: int) -> list[Parts]:
    """Return all lines of the figures view, for a size of ``width`` and ``height`` cells."""
    lines = _gauge(pool.use, width) if pool.use is not None else []
    if width >= _SIDE_BY_SIDE:
        half = (width - 4) // 2
        right = [*_savings(pool, half), *_counts(pool, half, spread=False)]
        pairs = zip_longest(_shares(pool, half), right, fillvalue=Parts())
        for one, two in pairs:
            rest = half + 4 - sum(len(text) for text, _ in one)
            lines.append([*one, (" " * rest, "label"), *two])
    else:
        rule: Parts = [("", "label")]
        lines += [*_shares(pool, width), rule, *_savings(pool, width), rule, *_counts(pool, width, spread=True)]
    lines_left = height - len(lines) - 2
    if lines_left >= _LEAST_CHART:
        lines += [[("", "label")], *_chart(pool, width, min(lines_left, 24))]
    return lines


def _gauge(use: MemoryUse, width: int) -> list[Parts]:
    """Return lines that show how the device's memory is used (weights, cache, …), as a bar and in words."""
    others = max(0, use.total - use.free - use.weights - use.cache - use.rest)
    kinds = [
        ("weights", use.weights, "used", "█"),
        ("cache", use.cache, "shared", "▓"),
        ("steps", use.rest, "cached", "▒"),
        ("others", others, "waste", "░"),
        ("free", use.free, "free", "·"),
    ]
    bar_parts: Parts = []
    start = 0.0
    for _, amount, part, mark in kinds:
        end = start + amount / max(1, use.total) * width
        bar_parts.append((mark * (round(end) - round(start)), part))
        start = end
    words: Parts = [(f"device {size(use.total)}: ", "label")]
    for name, amount, part, mark in kinds:
        words += [(f"{mark} ", part), (f"{name} ", "label"), (f"{size(amount)}  ", "figure")]
    return [bar_parts, *_wrapped(words, width), [("", "label")]]


def _wrapped(parts: Parts, width: int) -> list[Parts]:
    """Break the words of `_gauge` into lines of at most ``width`` cells. Each figure stays with its mark and name."""
    lines: list[Parts] = [[]]
    groups = [parts[:1], *(parts[i : i + 3] for i in range(1, len(parts), 3))]
    for group in groups:
        if sum(len(text) for text, _ in [*lines[-1], *group]) > width and lines[-1]:
            lines.append([])
        lines[-1] += group
    return lines


def _shares(pool: Pool, width: int) -> list[Parts]:
    """Return a line for each kind of block: tokens and bytes now, and a chart over time.

    All charts have the same scale.
    """
    slot_bytes = pool.block_bytes / pool.block_size
    history = list(pool.history) or [pool.figures]
    chart_width = max(4, width - 28)
    lines: list[Parts] = [[(f"{'':7} {'over time':<{chart_width}} {'tokens':>10} {'bytes':>8}", "label")]]
    rows: list[tuple[str, Callable[[PoolFigures], int]]] = [
        ("used", lambda figures: figures.used_slots),
        ("shared", lambda figures: figures.shared_blocks * pool.block_size),
        ("waste", lambda figures: max(0, _held(pool, figures) * pool.block_size - figures.used_slots)),
        ("cached", lambda figures: figures.cached_blocks * pool.block_size),
        ("free", lambda figures: figures.free_blocks * pool.block_size),
    ]
    values = {name: [slots(figures) for figures in history[-chart_width:]] for name, slots in rows}
    most = max(1, *map(max, values.values()))
    for name, slots in rows:
        now = slots(pool.figures)
        chart = [(f"{name:<7} ", "label"), (sparkline(values[name], chart_width, most), name)]
        lines.append([*chart, (f" {count(now):>10}", "figure"), (f" {size(now * slot_bytes):>8}", "label")])
    return lines


def _held(pool: Pool, figures: PoolFigures) -> int:
    return pool.num_blocks - figures.free_blocks - figures.cached_blocks


def _savings(pool: Pool, width: int) -> list[Parts]:
    """Return three lines: the memory that the sequences take, and would take without sharing or without paging."""
    slot_bytes = pool.block_bytes / pool.block_size
    on_device = sum(1 for table in pool.tables.values() if table.state != "swapped")
    without, label = ("without", 15) if width >= _WIDE_HALF else ("no", 10)
    rows = [
        ("in use", pool.used_blocks * pool.block_size, "used"),
        (f"{without} sharing", pool.figures.logical_blocks * pool.block_size, "shared"),
        (f"{without} paging", on_device * pool.max_model_len, "without"),
    ]
    most = max(1, *(slots for _, slots, _ in rows))
    bar_width = max(2, width - label - 21)
    lines = []
    for name, slots, part in rows:
        meter = [(f"{name:<{label}} ", "label"), (bar(slots / most, bar_width), part)]
        lines.append([*meter, (f" {count(slots):>10}", "figure"), (f" {size(slots * slot_bytes):>8}", "label")])
    return lines


def _counts(pool: Pool, width: int, *, spread: bool) -> list[Parts]:
    """Return lines with the numbers of cache events since the engine's start.

    ``spread``: there is space for one more line.
    """
    counts = pool.counts
    looked_up, hits = counts.num_looked_up_tokens, counts.num_hit_tokens
    rate = f"{hits / looked_up:.0%}" if looked_up else "none yet"
    hit_rate = [("hit rate ", "label"), (rate, "figure"), (f"  {count(hits)} of {count(looked_up)} tokens", "label")]
    disk = _disk(pool)
    if spread:
        pairs = [
            ("copied on write", counts.num_copies),
            ("evicted", counts.num_evictions),
            ("preempted", counts.num_preemptions),
            ("swapped out", counts.num_swapped_out),
            ("swapped in", counts.num_swapped_in),
            ("on the CPU", counts.host_blocks_used),
        ]
        cells = [[(f"{name:<15} ", "label"), (f"{count(number):<5}", "figure")] for name, number in pairs]
        return [hit_rate, *([*one, *two] for one, two in zip(cells[::2], cells[1::2], strict=True)), *disk]
    swaps = f"{count(counts.num_swapped_out)} out, {count(counts.num_swapped_in)} in"
    happened = [*_named("copies", counts.num_copies), *_named("evicted", counts.num_evictions)]
    return [
        hit_rate,
        [*happened, *_named("preempted", counts.num_preemptions)],
        [("swapped ", "label"), (f"{swaps}  ", "figure"), *_named("on the CPU", counts.host_blocks_used)],
        *disk,
    ]


def _disk(pool: Pool) -> list[Parts]:
    """Return lines about the disk cache: its size, the number of blocks read from disk, and the read rate.

    Return [] if there is no disk cache.
    """
    counts = pool.counts
    if not counts.disk_limit:
        return []
    lines: list[Parts] = [
        [("disk ", "label"), (size(counts.disk_bytes), "figure"), (f" of {size(counts.disk_limit)}", "label")]
    ]
    if counts.num_disk_read and counts.disk_read_seconds:
        rate = size(counts.num_disk_read * pool.block_bytes / counts.disk_read_seconds)
        number = plural(counts.num_disk_read, "block")
        lines.append([("from disk ", "label"), (number, "figure"), (f" at {rate}/s", "label")])
    return lines


def _named(name: str, number: int) -> Parts:
    return [(f"{name} ", "label"), (f"{count(number)}  ", "figure")]


def _chart(pool: Pool, width: int, height: int) -> list[Parts]:
    """Return a chart of the pool over time. Each column is one moment; each kind of block has a letter.

    If the pool is nearly empty, only the lower part of the chart is drawn, enlarged.
    """
    history = list(pool.history)[-width:] or [pool.figures]
    most = max(pool.num_blocks - figures.free_blocks for figures in history)
    top = min(pool.num_blocks, max(_LEAST_DRAWN, 1 << most.bit_length()))
    part = [[(f"showing {count(top)} of {count(pool.num_blocks)} blocks", "label")]] if top < pool.num_blocks else []
    height -= len(part)
    columns = [_column(pool, figures, height - 1, top) for figures in history]
    blank = width - len(columns)
    title: Parts = []
    for name, mark, meaning in _CHART:
        title += [("  " if title else "", "label"), (mark, name), (f" {meaning}", "label")]
    lines: list[Parts] = [title, *part]
    for row in range(height - 2, -1, -1):
        parts: Parts = [(" " * blank, "label")] if blank else []
        for column in columns:
            name, mark, _ = _CHART[column[row]]
            if parts and parts[-1][1] == name:
                parts[-1] = (parts[-1][0] + mark, name)
            else:
                parts.append((mark, name))
        lines.append(parts)
    return lines


def _column(pool: Pool, figures: PoolFigures, height: int, top: int) -> Sequence[int]:
    """Return the kind of block that each of the ``height`` cells in a chart's column shows, from bottom to top.

    The whole column stands for ``top`` blocks. If any blocks are in use, at least one cell shows blocks in use.
    """
    held, size_ = _held(pool, figures), pool.block_size
    waste = max(0, held * size_ - figures.used_slots) / size_
    shared = min(figures.shared_blocks, held)
    free = max(0, top - held - figures.cached_blocks)
    amounts = (max(0.0, held - shared - waste), shared, waste, figures.cached_blocks, free)
    cells = [amount / max(1, top) * height for amount in amounts]
    counts = [int(cell) for cell in cells]
    by_rest = sorted(range(len(cells)), key=lambda kind: counts[kind] - cells[kind])
    for kind in by_rest[: max(0, height - sum(counts))]:
        counts[kind] += 1
    while sum(counts) != height:
        counts[counts.index(max(counts))] += 1 if sum(counts) < height else -1
    if held and not sum(counts[:3]):
        counts[cells.index(max(cells[:3]))] += 1
        counts[counts.index(max(counts))] -= 1
    return [kind for kind, number in enumerate(counts) for _ in range(number)]
