"""Files of blocks: damage, kills, the quota of several processes, and who may read them."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.block_files import SIZE, chain, content, read, spoil, store_in, write
from minillm.blockstore.files import BlockStore, erase, eviction_order, listed, read_about
from minillm.system import child_environment


def test_a_block_comes_back_through_buffers_of_any_sizes(tmp_path: Path) -> None:
    store, [key] = store_in(tmp_path), chain([5])
    write(store, key)
    assert read(store, key)
    many = [bytearray(2) for _ in range(SIZE // 2)]  # more buffers than a system call takes
    assert store.read(key, [memoryview(each) for each in many])
    assert b"".join(many) == content(key)


def test_facts_stay_for_the_next_process_and_damaged_ones_are_replaced(tmp_path: Path) -> None:
    store_in(tmp_path).save_about({"rate": 5})
    assert store_in(tmp_path).about == {"model": "tiny", "rate": 5}
    (store_in(tmp_path).home / "about.json").write_bytes(b'{"rate": 5')
    assert store_in(tmp_path).about == read_about(store_in(tmp_path).home) == {"model": "tiny"}


def test_a_key_covers_all_tokens_before_the_block() -> None:
    """The same tokens after other ones have another K and V."""
    one, other = chain([1, 2, 3]), chain([9, 2, 3])
    assert not {key.name for key in one} & {key.name for key in other}
    assert not {key.digest for key in one} & {key.digest for key in other}


def test_only_the_user_may_read_blocks(tmp_path: Path) -> None:
    root = tmp_path / "blocks"
    root.mkdir(mode=0o755)
    store, [key] = store_in(root), chain([5])
    write(store, key)
    store.add_names("conversation", [key.name])
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root, store.home)} == {0o700}
    assert "conversation" not in " ".join(path.name for path in root.rglob("*"))


def spoilt(directory: Path, times: int, seed: int) -> None:
    rng, store = random.Random(seed), store_in(directory)
    for number in range(times):
        [key] = chain([number])
        write(store, key)
        before = Path(store.path(key)).read_bytes()
        spoil(Path(store.path(key)), rng)
        if Path(store.path(key)).read_bytes() == before:
            continue  # cut at its end
        assert not read(store, key), "a damaged file counts as missing"
        assert not store.has(key), "and is removed"


def test_a_flipped_bit_or_a_cut_is_a_miss(tmp_path: Path) -> None:
    spoilt(tmp_path, 60, seed=1)


@pytest.mark.soak
def test_a_thousand_flipped_bits_and_cuts_are_misses(tmp_path: Path) -> None:
    spoilt(tmp_path, 1000, seed=2)


def test_a_foreign_file_is_a_miss(tmp_path: Path) -> None:
    store, (one, other) = store_in(tmp_path), chain([5, 6])
    write(store, one)
    os.rename(store.path(one), store.path(other))
    assert not read(store, other)
    os.mkfifo(store.path(one))
    assert not read(store, one), "nobody waits for a pipe"
    os.symlink("/etc/passwd", store.path(one))
    assert not read(store, one)
    assert list(listed(tmp_path)) == []


def test_the_least_recently_used_goes_first_and_a_tail_before_its_head(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    old, new = chain([1, 2, 3]), chain([7, 8, 9])
    for key in (*old, *new):
        write(store, key)
    store.touch(old[-1])
    names = [Path(block.path).name for block in eviction_order(listed(tmp_path))]
    assert names == [key.name for key in (*new[::-1], *old[::-1])]


def test_a_clock_that_goes_back_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, [first], [second] = store_in(tmp_path), chain([1]), chain([2])
    write(store, first)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 10**15)
    write(store, second)
    assert [block.digest for block in eviction_order(listed(tmp_path))] == [
        key.digest.hex()[:32] for key in (first, second)
    ]


def test_all_identities_and_processes_keep_one_quota(tmp_path: Path) -> None:
    limit = 20 * (SIZE + 64)
    stores = [BlockStore(tmp_path, bytes([number]) * 32, {}, limit) for number in range(3)]
    removed = [name for number in range(30) for store in stores for name in write(store, chain([number])[0])]
    assert len(removed) > 60
    stores[0].trim()  # each process looks at the others' blocks only now and then
    left = sum(block.num_bytes for block in listed(tmp_path))
    assert limit * 0.7 < left <= limit
    assert [store.has(chain([29])[0]) for store in stores] == [True] * 3, "the last ones stay"


def test_an_owners_blocks_are_erased_and_shared_ones_stay(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    one, other = chain([1, 2, 3]), chain([1, 2, 4])
    for owner, found in (("one", one), ("other", other)):
        store.add_names(owner, [key.name for key in found])
        for key in found:
            write(store, key)
    (store.home / "kept").write_text("")
    with (store.home / next(path.name for path in store.home.glob("owner-*"))).open("a") as file:
        file.write("../kept\n")  # no name of a block
    assert erase(tmp_path, "one") == 1
    assert [store.has(key) for key in (*one, other[-1])] == [True, True, False, True]
    assert erase(tmp_path, "other") == 3
    assert list(listed(tmp_path)) == []
    assert (store.home / "kept").exists()


def killed(directory: Path, times: int, seed: int) -> None:
    """Run `kill_at_random` in a process without threads, which can fork."""
    program = Path(__file__).parents[1] / "lib" / "block_files.py"
    command = [sys.executable, str(program), str(directory), str(times), str(seed)]
    subprocess.run(command, env=child_environment(), check=True)


def test_kills_leave_whole_blocks(tmp_path: Path) -> None:
    killed(tmp_path, 30, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_kills_leave_whole_blocks(tmp_path: Path) -> None:
    killed(tmp_path, 1000, seed=2)
