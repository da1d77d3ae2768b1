"""``import minillm``: the names that it offers, and when they are imported."""

from __future__ import annotations

import subprocess
import sys

import minillm


def test_tab_shows_the_public_names() -> None:
    assert {"LLM", "SamplingParams", "BeamSearchParams", "RequestOutput", "__version__"} <= set(dir(minillm))
    assert not {"Any", "TYPE_CHECKING", "annotations"} & set(dir(minillm))
    assert all(getattr(minillm, name) is not None for name in dir(minillm))
    assert minillm.__version__[0].isdigit()


def test_a_star_brings_them_all_and_looking_brings_nothing_heavy() -> None:
    """The engine needs neither textual nor gguf nor triton, and without a grammar no llguidance."""
    code = """
import sys
import minillm
dir(minillm), minillm.__version__
assert "torch" not in sys.modules
from minillm import *
assert minillm.LLM is LLM and SamplingParams(max_tokens=3).max_tokens == 3
BeamSearchParams()
print([m for m in ("textual", "gguf", "triton", "llguidance", "minillm.ui") if m in sys.modules])
try:
    minillm.LMM
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\nmodule 'minillm' has no attribute 'LMM'\n"


def test_progress_starts_no_process() -> None:
    """A lock of multiprocessing starts a resource tracker in Python 3.14."""
    code = """
import _multiprocessing
_multiprocessing.SemLock = None  # such a lock could not be created
from minillm.progress import loading_bar, say
with loading_bar(enabled=True) as report:
    say("hello")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "minillm: hello")
