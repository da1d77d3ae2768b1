"""The bandwidth that forecasts of speed use: the best measurement is kept, and a busy machine is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm.loading import bandwidth
from minillm.loading.bandwidth import best_of, is_busy, kept_rate, known_rate
from minillm.system import processor


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_best_measurement_is_kept_until_a_better_one(cache: Path) -> None:
    rates = iter([5e9, 9e9, 20e9, 7e9, 6e9, 8e9, 9e9, 9e9])
    first = best_of("a processor", lambda: next(rates))
    assert first == bandwidth.Bandwidth(20e9, is_busy=True), "the median is 9e9"
    assert best_of("a processor", lambda: 10e9).rate == 20e9
    assert best_of("a processor", lambda: 10e9).is_busy, "it was twice as fast before"
    assert best_of("a processor", lambda: 21e9).rate == kept_rate("a processor") == 21e9
    assert kept_rate("another") is None
    assert best_of("another", lambda: 3e9).rate == 3e9
    assert kept_rate("a processor") == 21e9
    assert [path.name for path in cache.iterdir()] == ["bandwidth.json"], "no part is left"


def test_other_programs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def clocks(*ends: tuple[float, float, float]) -> None:
        readings = iter(ends)
        monkeypatch.setattr(bandwidth, "_clocks", lambda: next(readings))

    clocks((10.0, 100.0, 5.0), (12.0, 103.9, 6.9))  # 2 s, in which 1.9 of 3.9 core seconds were this process's
    assert best_of("x", lambda: 2e10) == bandwidth.Bandwidth(2e10, is_busy=True)
    clocks((10.0, 100.0, 5.0), (12.0, 102.2, 6.9))
    assert best_of("x", lambda: 2e10) == bandwidth.Bandwidth(2e10)
    assert not is_busy([1.6e10, 1.7e10, 2e10], 2e10, 0.1)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\xfe", b'{"x": "fast"}', b'{"x": NaN}', b'{"x": -1}', b'{"x": 1e400}', b'{"x": true}',
     b"[" * 20_000, b'{"x": 2e10}' + b" " * 100_000],
)  # fmt: skip
def test_a_damaged_file_counts_as_none(cache: Path, content: bytes) -> None:
    cache.mkdir()
    (cache / "bandwidth.json").write_bytes(content)
    assert kept_rate("x") is None
    assert best_of("x", lambda: 4e9).rate == kept_rate("x") == 4e9


def test_no_place_to_write_is_no_error(cache: Path) -> None:
    cache.write_text("a file in the place of the directory")
    assert best_of("x", lambda: 4e9).rate == 4e9
    cache.unlink()
    (cache / "bandwidth.json").mkdir(parents=True)
    assert best_of("x", lambda: 4e9).rate == 4e9
    assert kept_rate("x") is None


def test_this_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_PROBE_BYTES", 1 << 24)
    rate = known_rate(torch.device("cpu"))
    assert 1e8 < rate < 1e14
    assert rate == kept_rate(processor())
    monkeypatch.setattr(bandwidth, "measure", lambda device: pytest.fail("it is known"))
    assert known_rate(torch.device("cpu")) == rate
