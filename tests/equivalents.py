"""Changes that `mutate` may draw and that change nothing: by name, the code before and after, and the reason."""

from __future__ import annotations

EQUIVALENTS: dict[str, tuple[str, str, str]] = {
    "minillm/grammar/ecma.py::<module>::one-less::39": (
        "0",
        "(-1)",
        "Only repetitions have a least count, and they are all made with one.",
    ),
    "minillm/grammar/regular.py::Algebra.repeat::condition-dropped::9": (
        "of.kind == 'rep' and of.least <= 1 and (of.most is None) and (most is None)",
        "(of.kind == 'rep' and of.least <= 1 and (most is None))",
        "A group repeated without bound has the same texts whether or not it has a bound of its own.",
    ),
}
