"""Test the tile sizes of a loaded model: measured once per kind of GPU, saved and read again. Needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm.kernels.linear.low_bit.layouts import Layout, LowBit
from minillm.model.llama import Llama
from minillm.model.loader import load_llama
from minillm.model.random_tensors import RandomTensors
from minillm.model.shapes import SHAPES
from minillm.progress import Progress, ignore_progress

pytest.importorskip("triton")

from minillm.kernels.linear.low_bit.tuning import OnCount, Product, Timed, buckets, candidates
from minillm.loading.tiles import RECORDED, TileFile, choose_tiles, known, products_of

CONFIG = replace(
    SHAPES["llama-1b"], hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, intermediate_size=512,
    num_layers=4, vocab_size=512,
)  # fmt: skip
HALF = torch.bfloat16


class Measurer:
    """Takes each product's last candidate; stops as ctrl-c does after ``most`` results."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.asked: list[Product] = []
        self.most = most

    def __call__(
        self, products: Mapping[Product, Sequence[LowBit]], dtype: torch.dtype, compiled: OnCount, timed: OnCount
    ) -> Iterator[Timed]:
        self.asked += products
        compiled(1, 1)
        results = [Timed(each, n, candidates(each, n)[-1], 2.5) for each in products for n in buckets(dtype)]
        for done, result in enumerate(results, 1):
            if done > self.most:
                raise KeyboardInterrupt
            timed(done, len(results))
            yield result


class Rank:
    """One of several ranks; notes when it waits for the others."""

    def __init__(self, rank: int, events: list[str]) -> None:
        self.rank, self.events = rank, events

    def least(self, value: int) -> int:
        self.events.append(f"{self.rank} meets the others")
        return value


@pytest.fixture
def file(tmp_path: Path) -> TileFile:
    return TileFile("NVIDIA GeForce RTX 3060", tmp_path / "cache" / "tiles" / "card.json", "digest")


def model(form: str | None = "q4_k_m", config: object = CONFIG) -> Llama:
    source = RandomTensors(config, torch.device("cpu"), form=form)  # type: ignore[arg-type]
    return load_llama(
        source, config, device=torch.device("cpu"), dtype=HALF, max_positions=64,  # type: ignore[arg-type]
        weights="stored" if form else "expanded",
    )  # fmt: skip


def parts(loaded: Llama) -> list[LowBit]:
    linears = [each for layer in loaded.layers for each in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return [part for linear in (*linears, loaded.head) for part in linear.parts]


def choose(loaded: Llama, file: TileFile, measurer: Measurer) -> list[str]:
    said: list[str] = []
    choose_tiles(loaded, file, None, ignore_progress, said.append, measurer)
    return said


def test_products_are_those_that_the_layers_compute() -> None:
    found = {str(product): len(matrices) for product, matrices in products_of(model()).items()}
    finer = sum(RandomTensors(CONFIG, torch.device("cpu"))._is_finer(f"model.layers.{i}.down_proj") for i in range(4))
    assert 0 < finer < 4
    assert found == {
        "4 bits super 32, 320 x 256, norm": finer,  # q and k beside a finer v
        "6 bits bytes 16, 64 x 256, norm": finer,
        "4 bits super 32, 384 x 256, norm": 4 - finer,
        "4 bits super 32, 256 x 256, add": 4,
        "4 bits super 32, 1024 x 256, gated": 4,
        "4 bits super 32, 256 x 512, add": 4 - finer,
        "6 bits bytes 16, 256 x 512, add": finer,
        "4 bits super 32, 512 x 256, norm": 1,  # the head, which is the embedding
    }


def test_a_gate_of_two_layouts_has_no_gate_in_its_products() -> None:
    loaded = model()
    first = loaded.layers[0].gate_up
    whole = first.parts[0]
    first.parts = (whole.rows(slice(0, 512)), whole.rows(slice(512, 1024)))
    names = [(product.shape, product.place) for product in products_of(loaded)]
    assert ((512, 256), "norm") in names
    assert ((512, 256), "gated") not in names


def test_names_tell_all_layouts_apart() -> None:
    layouts = [Layout(4, "plain"), Layout(4, "plain", table=True), Layout(4, "zeros", group=128),
               Layout(6, "bytes", group=16), Layout(8, "plain", group=0), Layout(8, "plain"),
               Layout(4, "offset"), Layout(4, "super"), Layout(4, "bytes", table=True)]  # fmt: skip
    places = ("norm", "gated", "add")
    names = {str(Product(each, (64, 256), place)) for each in layouts for place in places}  # type: ignore[arg-type]
    assert len(names) == len(layouts) * 3


def test_a_new_card_is_measured_once_and_its_file_is_read_again(file: TileFile) -> None:
    first, measurer = model(), Measurer()
    said = choose(first, file, measurer)
    assert measurer.asked == list(products_of(first))
    what = f"{file.card}: measuring the fastest tiles for 8 kinds of low-bit matrices, once"
    assert said == [f"{what}; delete {file.path} to measure again"]
    again, second = model(), Measurer()
    assert choose(again, file, second) == []
    assert second.asked == []
    for loaded in (first, again):
        for product, matrices in products_of(loaded).items():
            for matrix in matrices:
                assert matrix.tiles == {tokens: candidates(product, tokens)[-1] for tokens in buckets(HALF)}
    assert [each.name for each in file.path.parent.iterdir()] == [file.path.name], "nothing unfinished is left"


def test_only_what_is_missing_is_measured_and_the_rest_is_kept(file: TileFile) -> None:
    choose(model("q4_k_m"), file, Measurer())
    other, measurer = model("q6_k"), Measurer()
    choose(other, file, measurer)
    assert {each.layout.bits for each in measurer.asked} == {6}
    assert len(measurer.asked) < len(products_of(other)), "the finer ones were known"
    kept = Measurer()
    choose(model("q4_k_m"), file, kept)
    assert kept.asked == []


def test_progress_names_the_card(file: TileFile) -> None:
    told: list[Progress] = []
    choose_tiles(model(), file, None, told.append, measure=Measurer())
    assert told[0].label == "compiling kernels to measure"
    assert {each.label for each in told[1:]} == {"measuring tiles for NVIDIA GeForce RTX 3060"}
    assert (told[-1].done, told[-1].total) == (48, 48)


def test_ctrl_c_keeps_what_is_known_and_the_next_load_measures_the_rest(file: TileFile) -> None:
    loaded = model()
    with pytest.raises(KeyboardInterrupt):
        choose(loaded, file, Measurer(most=15))  # two products and a half
    assert not any(part.tiles for part in parts(loaded))
    rest = Measurer()
    choose(loaded, file, rest)
    assert rest.asked == list(products_of(loaded))[2:]
    assert all(len(part.tiles) == 6 for part in parts(loaded))


DAMAGED = {
    "half": b'{"card": "NVIDIA GeForce RTX 3060", "ker', "none": b"", "bytes": b"\xff\xfe\x00", "list": b"[1]",
    "number": b"7", "nested": b"[" * 100_000,
    "no tiles": b'{"card": "NVIDIA GeForce RTX 3060", "kernels": "digest"}',
    "tiles of text": b'{"card": "NVIDIA GeForce RTX 3060", "kernels": "digest", "tiles": "x"}',
    "tokens of text": b'{"card": "NVIDIA GeForce RTX 3060", "kernels": "digest", "tiles": {"a": {"b": [1]}}}',
    "tile of a number": b'{"card": "NVIDIA GeForce RTX 3060", "kernels": "digest", "tiles": {"a": {"1": 3}}}',
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_said_in_a_line_and_measured_anew(file: TileFile, name: str) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(DAMAGED[name])
    loaded, measurer = model(), Measurer()
    said = choose(loaded, file, measurer)
    assert said[0].startswith(f"{file.path} cannot be read")
    assert all("\n" not in line for line in said)
    assert measurer.asked == list(products_of(loaded))
    after = Measurer()
    assert choose(loaded, file, after) == []
    assert after.asked == []


@pytest.mark.parametrize("tile", [[64, 64, 64], [], [1, 2], ["1", 1, 16], [0, 1, 16], None, {}])
def test_a_tile_that_is_no_candidate_counts_for_nothing(file: TileFile, tile: object) -> None:
    loaded = model()
    choose(loaded, file, Measurer())
    content = json.loads(file.path.read_text())
    product = next(iter(products_of(loaded)))
    content["tiles"][str(product)]["1"] = tile
    file.path.write_text(json.dumps(content))
    measurer = Measurer()
    choose(loaded, file, measurer)
    assert product in measurer.asked
    assert all(len(part.tiles) == 6 for part in parts(loaded))


@pytest.mark.parametrize("other", [{"card": "NVIDIA A10"}, {"kernels": "of another version"}])
def test_tiles_of_another_card_or_of_other_kernels_count_for_nothing(file: TileFile, other: dict[str, Any]) -> None:
    choose(model(), replace(file, **other), Measurer())
    measurer = Measurer()
    choose(model(), file, measurer)
    assert len(measurer.asked) == 8


def test_the_recorded_card_is_not_measured_but_what_was_measured_there_is_used(file: TileFile) -> None:
    loaded, measurer, recorded = model(), Measurer(), replace(file, card=RECORDED)
    assert choose(loaded, recorded, measurer) == []
    assert measurer.asked == []
    assert not any(part.tiles for part in parts(loaded))
    assert not file.path.exists()
    for product in products_of(loaded):
        recorded.add({str(product): {n: candidates(product, n)[0] for n in buckets(HALF)}}, lambda message: None)
    choose(loaded, recorded, measurer)
    assert measurer.asked == []
    assert all(len(part.tiles) == 6 for part in parts(loaded))


def test_a_model_of_16_bits_touches_nothing(file: TileFile) -> None:
    events: list[str] = []
    choose_tiles(model(None), file, Rank(0, events), ignore_progress, measure=Measurer())  # type: ignore[arg-type]
    assert events == []
    assert not file.path.parent.exists()


def test_a_place_that_cannot_be_written_is_said_and_the_tiles_are_used(tmp_path: Path) -> None:
    (tmp_path / "tiles").write_text("in the way")
    file = TileFile("NVIDIA A10", tmp_path / "tiles" / "card.json", "digest")
    loaded = model()
    said = choose(loaded, file, Measurer())
    assert "cannot be written" in said[-1]
    assert all(len(part.tiles) == 6 for part in parts(loaded))


def test_the_first_rank_measures_and_the_others_read(file: TileFile) -> None:
    """The others wait until the first has written; a rank with a shape of its own measures that alone."""
    events: list[str] = []
    first = Measurer()
    choose_tiles(model(), file, Rank(0, events), ignore_progress, measure=first)  # type: ignore[arg-type]
    assert events == ["0 meets the others"]
    assert len(first.asked) == 8
    like, other = Measurer(), Measurer()
    choose_tiles(model(), file, Rank(1, events), ignore_progress, measure=like)  # type: ignore[arg-type]
    assert like.asked == []
    uneven = model(config=replace(CONFIG, intermediate_size=256))
    choose_tiles(uneven, file, Rank(2, events), ignore_progress, measure=other)  # type: ignore[arg-type]
    assert {each.shape for each in other.asked} == {(512, 256), (256, 256)}
    assert events == ["0 meets the others", "1 meets the others", "2 meets the others"]
    assert set(json.loads(file.path.read_text())["tiles"]) == set(map(str, [*first.asked, *other.asked]))


def test_a_waiting_rank_reads_after_the_first_has_written(file: TileFile) -> None:
    class Late(Rank):
        def least(self, value: int) -> int:
            choose(model(), file, Measurer())  # the first rank does so before it meets the others
            return value

    measurer = Measurer()
    choose_tiles(model(), file, Late(1, []), ignore_progress, measure=measurer)  # type: ignore[arg-type]
    assert measurer.asked == []


def test_known_tiles_are_of_every_number_of_tokens() -> None:
    product = next(iter(products_of(model())))
    whole = {n: candidates(product, n)[0] for n in buckets(HALF)}
    assert known({str(product): whole}, [product], HALF) == {str(product): whole}
    few = {n: whole[n] for n in (1, 2)}
    assert known({str(product): few}, [product], HALF) == {}
    assert known({str(product): few}, [product], torch.float32) == {str(product): few}


def test_a_card_of_each_name_capability_and_version_of_triton_has_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    files = []
    for card, capability, version in (("A/B c", (8, 6), "3.6.0"), ("D", (8, 6), "3.6.0"), ("D", (8, 9), "3.6.0"),
                                      ("D", (8, 9), "3.7.0")):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, card=card: card)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        monkeypatch.setattr("triton.__version__", version)
        files.append(TileFile.of(torch.device("cuda", 0)))
    assert files[0].path == tmp_path / "tiles" / "A-B-c-8-6-triton3-6-0.json"
    assert len({each.path for each in files}) == 4
    assert len({each.kernels for each in files}) == 1
    assert files[0].card == "A/B c"
