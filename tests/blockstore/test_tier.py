"""The disk below the prefix cache, against a plain-Python model of both."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from lib.disk_model import DiskModel, random_disk_history
from lib.pool_model import PoolModel
from minillm.blockstore.files import erase, listed


def histories(directory: Path, operations: int, first_seed: int = 0) -> None:
    """Run random histories until this many operations are done."""
    seed, done, from_disk = first_seed, 0, 0
    while done < operations:
        rng = random.Random(seed)
        size = rng.choice([1, 2, 4])
        model = DiskModel(
            num_blocks=rng.choice([3, 8, 24]),
            block_size=size,
            prefix_caching=True,
            num_host_blocks=8,
            directory=directory / str(seed),
            limit=rng.choice([1 << 30, 20 * (8 * size + 64)]),
        )
        length = rng.randint(10, 80)
        random_disk_history(model, rng, length)
        model.drain()
        model.tier.close()
        assert model.messages == []
        from_disk += model.num_disk_tokens
        seed, done = seed + 1, done + length
    assert from_disk > operations // 20, "the histories hardly read from disk"


def test_each_sequence_reads_its_own_tokens_after_kills_and_damage(tmp_path: Path) -> None:
    histories(tmp_path, 2500)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_operations_with_a_disk(tmp_path: Path) -> None:
    histories(tmp_path, 100_000, first_seed=1_000_000)


def filled(directory: Path, prompt: list[int]) -> DiskModel:
    """Return a model of a new process that has computed ``prompt``."""
    model = DiskModel(num_blocks=16, block_size=4, prefix_caching=True, directory=directory)
    seq = model.allocate(prompt)
    model.append(seq, 0, prompt[len(model.tokens[seq]) :])
    model.run_step()
    return model


def test_a_later_process_finds_full_blocks_and_the_kept_tail(tmp_path: Path) -> None:
    prompt = list(range(10, 21))
    model = filled(tmp_path, prompt)
    model.keep_tail(next(iter(model.tables)))
    model.restart(killed=False)
    seq = model.allocate([*prompt, 99])
    assert (model.num_disk_tokens, model.tokens[seq]) == (11, prompt)
    model.check()
    model.restart(killed=False)
    seq = model.allocate([*prompt[:9], 99])
    assert model.tokens[seq] == prompt[:8], "the tail has other tokens"


def test_the_last_token_is_always_computed(tmp_path: Path) -> None:
    prompt = list(range(10, 18))
    filled(tmp_path, prompt).restart(killed=False)
    model = DiskModel(num_blocks=16, block_size=4, prefix_caching=True, directory=tmp_path)
    assert model.tokens[model.allocate(prompt)] == prompt[:4]


def test_blocks_of_another_salt_are_not_found(tmp_path: Path) -> None:
    prompt = list(range(10, 30))
    model = filled(tmp_path, prompt)
    model.restart(killed=False)
    assert model.tier.find(prompt, "tenant", 0) is None
    assert model.tier.find(prompt, "", 0) is None
    assert model.tier.find(prompt, None, 0) is not None


def test_a_prompt_is_computed_where_that_is_faster(tmp_path: Path) -> None:
    prompt = list(range(10, 30))
    model = filled(tmp_path, prompt)
    model.restart(killed=False)
    rates = model.tier.reader.rates
    rates["prefill_tokens_per_second"], rates["read_bytes_per_second"] = 100_000.0, 1e9
    assert model.tier.find(prompt, None, 0) is None, "16 tokens take 0.16 ms to compute, a read takes 2 ms"
    rates["prefill_tokens_per_second"] = 1000.0
    assert model.tier.find(prompt, None, 0) is not None


def test_a_full_disk_turns_the_tier_off_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = filled(tmp_path, list(range(10, 18)))
    model.restart(killed=False)

    def full(*_: object) -> list[str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model.tier.store, "write", full)
    for start in (100, 200, 300):
        seq = model.allocate([])
        model.append(seq, 0, list(range(start, start + 9)))
        model.run_step()
        model.tier._writer.submit(int).result()
    model.check()
    assert model.messages == [f"the disk cache is off: {tmp_path}: No space left on device"]
    assert model.tier.find(list(range(10, 18)), None, 0) is None


def test_a_disk_that_fails_while_blocks_wait_turns_the_tier_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DiskModel(num_blocks=8, block_size=2, prefix_caching=True, directory=tmp_path)
    model.tier._most_queued = 1

    def broken(*_: object) -> list[str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(model.tier.store, "write", broken)
    seq = model.allocate([])
    model.append(seq, 0, list(range(10, 21)))
    model.run_step()
    assert model.tier._unsaved
    model.tier._writer.submit(int).result()
    assert not model.tier.prepare_ahead()
    assert model.messages == [f"the disk cache is off: {tmp_path}: Input/output error"]


def test_blocks_wait_in_the_pool_while_the_queue_is_full(tmp_path: Path) -> None:
    model = DiskModel(num_blocks=8, block_size=2, prefix_caching=True, directory=tmp_path)
    model.tier._most_queued = 0
    prompt = list(range(10, 21))
    seq = model.allocate([])
    model.append(seq, 0, prompt)
    model.run_step()
    assert len(model.tier._unsaved) == 5
    model.tier._most_queued = 4
    model.free(seq)
    other = model.allocate([])
    model.append(other, 0, list(range(100, 114)))  # evicts the last blocks, which are saved before they are written
    model.run_step()
    model.tier._most_queued = 100
    model.restart(killed=False)
    assert model.tokens[model.allocate([*prompt, 99])] == prompt[:10]


def test_erasing_an_owner_spares_the_blocks_of_others(tmp_path: Path) -> None:
    model = DiskModel(num_blocks=16, block_size=2, prefix_caching=True, directory=tmp_path)
    for owner, tokens in (("one", [1, 2, 3, 4, 5, 6]), ("two", [1, 2, 7, 8])):
        seq = model.allocate(tokens)
        model.append(seq, 0, tokens[len(model.tokens[seq]) :])
        table = model.tables[seq]
        PoolModel.run_step(model)
        model.tier.add(table, tokens, owner)
    model.tier.erase("one")
    model.restart(killed=False)
    assert model.tokens[model.allocate([1, 2, 3, 4, 5, 6, 0])] == [1, 2]
    assert model.tokens[model.allocate([1, 2, 7, 8, 0])] == [1, 2, 7, 8]
    model.tier.erase("two")
    model.restart(killed=False)
    assert model.tokens[model.allocate([1, 2, 7, 8, 0])] == []


def test_blocks_that_are_being_written_are_erased_although_their_list_is_gone(tmp_path: Path) -> None:
    """The chat removes the list and the blocks on it before it tells the engine."""
    model, written = DiskModel(num_blocks=16, block_size=2, prefix_caching=True, directory=tmp_path), threading.Event()
    model.tier._writer.submit(written.wait)
    seq = model.allocate([])
    model.append(seq, 0, [1, 2, 3, 4])
    table = model.tables[seq]
    PoolModel.run_step(model)
    model.tier.add(table, [1, 2, 3, 4], "one")
    assert erase(tmp_path, "one") == 0
    model.tier.erase("one")
    written.set()
    model.restart(killed=False)
    assert list(listed(tmp_path)) == []
