"""Changes that `mutate` may draw and that change nothing: by name, the code before and after, and the reason."""

from __future__ import annotations

EQUIVALENTS: dict[str, tuple[str, str, str]] = {
    "minillm/grammar/ecma.py::<module>::one-less::39": (
        "0",
        "(-1)",
        "Only repetitions have a least count, and they are all made with one.",
    ),
    "minillm/service/conversations.py::Conversations._keep_those_of_answers::one-more::0": (
        "1",
        "2",
        "It stands for less than any length, and no length is negative.",
    ),
    "minillm/service/file_pins.py::FilePins.keep::condition-dropped::0": (
        "sequence.table is None or num_blocks <= had or _MOST * num_blocks > cache.num_blocks",
        "(num_blocks <= had or _MOST * num_blocks > cache.num_blocks)",
        "Its caller gives it sequences with a table alone; a released one has no computed tokens, so no full block.",
    ),
    "ui/chat/search.py::SearchBar._bring_into_sight::statement-dropped::0": (
        "transcript.release_anchor()",
        "pass",
        "Textual's `scroll_to` on the next line releases the anchor as well.",
    ),
    "minillm/grammar/regular.py::Algebra.repeat::condition-dropped::9": (
        "of.kind == 'rep' and of.least <= 1 and (of.most is None) and (most is None)",
        "(of.kind == 'rep' and of.least <= 1 and (most is None))",
        "A group repeated without bound has the same texts whether or not it has a bound of its own.",
    ),
}
