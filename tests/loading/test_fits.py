"""Test that a model that cannot fit gives one line before allocation, and that a chat chooses a quantization."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from lib.checkpoints import LLAMA_1B, LLAMA_8B, forge_gguf, forge_hf, hf_tensors
from lib.gguf_files import gguf_model, write_gguf
from minillm.config import EngineConfig
from minillm.errors import CapacityError, DownloadError
from minillm.fit.budget import Budget
from minillm.fit.sizes import sized
from minillm.fit.weights import Layout, weights_in_memory
from minillm.loading import fits
from minillm.loading.engine import best_form, load_engine
from minillm.loading.fits import choose_form
from minillm.model.loader import parameter_shapes
from minillm.model.shapes import SHAPES
from minillm.model.shard import shard_of
from minillm.weights.files import FileRecord, ModelFiles, downloading, place
from minillm.weights.manifest import manifest_path
from minillm.weights.stored import StoredTensor

GIB = 1 << 30


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MINILLM_WEIGHTS", raising=False)
    monkeypatch.setattr("minillm.fit.budget.CPU_KEEPS_LOW_BIT", True)  # all sizes on one device


@pytest.fixture
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model is loaded that does not fit")

    monkeypatch.setattr("minillm.loading.build.load_llama", refuse)


def memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr("minillm.system.memory", lambda: (int(gib * GIB), 64 * GIB))


def gpu(gib: float, **options: Any) -> Callable[[], Budget]:
    return lambda: Budget(int(gib * GIB), int(gib * GIB), True, 2, EngineConfig(**options))


def here(name: str, source: Path) -> None:
    """Make the one file ``source`` the downloaded model ``name``."""
    with downloading(name, print) as partial:
        (partial / source.name).hardlink_to(source)
        place(name, partial, "a test", [FileRecord(source.name, source.stat().st_size, "")], {})


def manifest_with(path: Path, **places: Path) -> None:
    """Write a manifest with llama-3.1-8b, or another quantization of it, at ``places``."""
    text = manifest_path().read_text(encoding="utf-8")
    for name, place_of in places.items():
        if name == "full":
            hub = '{ hub = "meta-llama/Llama-3.1-8B-Instruct", revision = "main" }'
            assert hub in text
            text = text.replace(hub, f'{{ path = "{place_of}" }}')
    path.write_text(text, encoding="utf-8")


@pytest.mark.usefixtures("nothing_is_made")
def test_a_model_that_does_not_fit_is_one_line_with_the_form_that_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest_with(tmp_path / "w.toml", full=forge_hf(tmp_path / "8b", LLAMA_8B, hf_tensors(LLAMA_8B)))
    monkeypatch.setenv("MINILLM_WEIGHTS", str(tmp_path / "w.toml"))
    monkeypatch.setattr("minillm.text.tokenizer.Tokenizer.load", lambda source, size: None)
    memory(monkeypatch, 10.5)
    with pytest.raises(CapacityError) as caught:
        load_engine("llama-3.1-8b", EngineConfig(device="cpu"))
    said = str(caught.value)
    assert re.fullmatch(
        r"llama-3\.1-8b needs 15\.9 GiB of weights, \d+ MiB for the steps and at least 128 MiB of context, and this "
        r"machine has 10\.5 GiB of memory free; llama-3\.1-8b:q8_0 \(8\.0 GiB\) would fit: "
        r"minillm chat --model llama-3\.1-8b:q8_0",
        said,
    ), said
    memory(monkeypatch, 6)
    with pytest.raises(CapacityError, match=r"llama-3\.1-8b:q4_k_m \(4\.6 GiB\) would fit: minillm chat --model"):
        load_engine("llama-3.1-8b", EngineConfig(device="cpu"))
    memory(monkeypatch, 2)
    with pytest.raises(CapacityError, match=r"none of its quantizations would fit, the smallest takes 4\.6 GiB; use a"):
        load_engine("llama-3.1-8b", EngineConfig(device="cpu"))
    memory(monkeypatch, 16.5)  # the last matrix is in memory twice while it is packed
    with pytest.raises(CapacityError, match=r"15\.9 GiB of weights \(2\.0 GiB more while they are loaded\)"):
        load_engine("llama-3.1-8b", EngineConfig(device="cpu"))
    memory(monkeypatch, 18.5)
    with pytest.raises(AssertionError, match="is loaded that"):
        load_engine("llama-3.1-8b", EngineConfig(device="cpu"))


@pytest.mark.usefixtures("nothing_is_made")
def test_a_cpu_is_told_that_few_bits_could_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.fit.budget.CPU_KEEPS_LOW_BIT", False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("minillm.text.tokenizer.Tokenizer.load", lambda source, size: None)
    manifest_with(tmp_path / "w.toml", full=forge_hf(tmp_path / "8b", LLAMA_8B, hf_tensors(LLAMA_8B)))
    monkeypatch.setenv("MINILLM_WEIGHTS", str(tmp_path / "w.toml"))
    file = sized(str(tmp_path / "8b.gguf"), forge_gguf(tmp_path / "8b.gguf", LLAMA_8B))
    shard = shard_of(SHAPES["llama-8b"], 0, 1)

    def check(gib: float, weights: str = "auto", draft_bytes: int = 0) -> None:
        config = EngineConfig(device="cpu", weights=weights)
        budget = Budget(int(gib * GIB), 64 * GIB, False, 4, config, draft_bytes)
        fits.check_fits(file.name, SHAPES["llama-8b"], file.tensors, shard, budget)

    memory(monkeypatch, 10.5)
    with pytest.raises(CapacityError) as by_name:
        load_engine("llama-3.1-8b", EngineConfig(device="cpu"))
    assert re.search(r"; llama-3\.1-8b:q8_0 \(8\.\d GiB\) would fit: \S+ chat --model \S+$", str(by_name.value))
    directory = forge_hf(tmp_path / "dir", LLAMA_8B, hf_tensors(LLAMA_8B))
    with pytest.raises(CapacityError, match=r"; quantized further, \S+ \(\d\.\d GiB\) would fit: .* --weights int8$"):
        load_engine(str(directory), EngineConfig(device="cpu"))
    check(10.5)  # by itself, a file stays low-bit
    for weights in ("int8", "expanded"):  # other ways than that are no reason not to tell
        with pytest.raises(CapacityError, match=r"--weights stored$"):
            check(8, weights)
    check(8, "stored")
    with pytest.raises(CapacityError, match=r"; use a smaller model$"):
        check(4)
    with pytest.raises(CapacityError, match=r" of weights, 1\.0 GiB of its draft model, \d+ MiB for the steps "):
        check(4, draft_bytes=1 << 30)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "Q6_K", "F16"])
def test_a_cpu_dequantizes_what_then_takes_half_of_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("minillm.fit.budget.CPU_KEEPS_LOW_BIT", False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    model = sized("x", forge_gguf(tmp_path / "1b.gguf", LLAMA_1B, kind))

    def held(free: int, **options: Any) -> str:
        return model.layout(Budget(free, 64 * GIB, False, 4, EngineConfig(**options))).storage

    dequantized = model.weights(Budget(0, 0, False, 4, EngineConfig(weights="expanded"))).memory
    low_bit = "expanded" if kind == "F16" else "int4"
    assert held(2 * dequantized + 2) == "expanded"
    assert held(2 * dequantized - 2) == held(GIB) == low_bit
    assert held(2 * dequantized - 2, weights="expanded") == "expanded"
    assert held(64 * GIB, weights="stored") == "int4"
    assert held(2 * dequantized - 2, tensor_parallel_size=2) == low_bit, "ranks share the memory"


def test_the_loader_keeps_low_bit_what_would_take_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm import LLM

    monkeypatch.setattr("minillm.fit.budget.CPU_KEEPS_LOW_BIT", False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    write_gguf(tmp_path / "q8.gguf", gguf_model(), GGMLQuantizationType.Q8_0)
    model = sized("x", tmp_path / "q8.gguf")
    dequantized = model.weights(Budget(0, 0, False, 4, EngineConfig(weights="expanded"))).memory
    said: list[str] = []
    for share, kept in ((1.01, False), (0.99, True)):  # of the free memory, in dequantized weights
        monkeypatch.setattr("minillm.fit.budget.CPU_DEQUANTIZED_SHARE", share * dequantized / GIB)
        monkeypatch.setattr("minillm.system.memory", lambda: (GIB, GIB))
        with LLM(str(tmp_path / "q8.gguf"), device="cpu", num_blocks=8, on_message=said.append) as llm:
            bytes_kept = llm.engine.runner.model.weight_bytes
        assert (bytes_kept < 0.6 * dequantized, len(said)) == (kept, int(kept))
    assert "stays low-bit: dequantized it would take" in said[0]


@pytest.mark.usefixtures("nothing_is_made")
def test_a_file_and_random_weights_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = forge_hf(tmp_path / "8b", LLAMA_8B, hf_tensors(LLAMA_8B))
    monkeypatch.setattr("minillm.text.tokenizer.Tokenizer.load", lambda source, size: None)
    memory(monkeypatch, 4)
    for name, load_format in ((str(directory), "auto"), ("llama-8b", "dummy")):
        with pytest.raises(CapacityError, match=rf"^{re.escape(name)} needs 15\.9 GiB of weights.*use a smaller") as e:
            load_engine(name, EngineConfig(device="cpu", load_format=load_format))
        assert "\n" not in str(e.value)


def test_a_matrix_in_float32_counts_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a tied model is packed from the embedding, so that gate and up are what is largest."""
    model = sized("x", forge_hf(tmp_path / "1b", LLAMA_1B, hf_tensors(LLAMA_1B)))
    weights = weights_in_memory(model.tensors, Layout(4, packs=True))
    assert weights.loading == 2 * LLAMA_1B.intermediate * LLAMA_1B.hidden * 4


def test_each_of_several_ranks_needs_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SHAPES["llama-8b"]
    tensors = [StoredTensor(name, shape, "BF16") for name, shape in parameter_shapes(model)]

    def check(gib: float, size: int, rank: int = 0) -> None:
        fits.check_fits("m", model, tensors, shard_of(model, rank, size), gpu(gib, tensor_parallel_size=size)())

    check(24, 1)
    with pytest.raises(CapacityError, match=r"m needs 15\.0 GiB .* and the GPU has 12\.0 GiB free, 1\.2 GiB of it"):
        check(12, 1)
    check(12, 2)
    check(12, 2, 1)
    with pytest.raises(CapacityError, match=r"m needs 7\.5 GiB .* and each of 2 GPUs has 8\.0 GiB free"):
        check(8, 2)


def test_a_form_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm import LLM

    gguf_model().save_pretrained(tmp_path / "full")
    write_gguf(tmp_path / "q8.gguf", gguf_model(), GGMLQuantizationType.Q8_0)
    (tmp_path / "w.toml").write_text("""
default = "m"
[models.m]
description = "d"
parameters = "1"
license = "MIT"
size = 1
sources = [{ path = "full" }]
forms = [{ name = "q8", size = 1, path = "q8.gguf" }]
""")
    monkeypatch.setenv("MINILLM_WEIGHTS", str(tmp_path / "w.toml"))
    for name, path in (("m:q8", "q8.gguf"), ("m", "full"), ("m:full", "full"), (None, "full")):
        with LLM(name, device="cpu", num_blocks=8) as llm:
            assert llm.engine.source == str(tmp_path / path)
    assert choose_form("m", gpu(8)) == "m"


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are asked for; each can be had."""
    names: list[str] = []

    def resolve(name: str, **options: Any) -> ModelFiles:
        names.append(name)
        return ModelFiles(name, Path(name), "a test")

    monkeypatch.setattr(fits, "resolve", resolve)
    return names


@pytest.mark.parametrize(
    ("gib", "name"),
    [(8, "llama-3.1-8b:q4_k_m"), (10, "llama-3.1-8b:q6_k"), (12, "llama-3.1-8b:q8_0"), (24, "llama-3.1-8b")],
)
def test_the_form_with_the_most_bits_that_fits_is_taken(gib: float, name: str, fetched: list[str]) -> None:
    said: list[str] = []
    assert choose_form("llama-3.1-8b", gpu(gib), on_message=said.append) == name
    assert fetched == [name]
    shown = name if ":" in name else f"{name}:full"
    assert len(said) == 1
    assert said[0].startswith(f"taking {shown}, the best quantization that fits (")
    assert re.search(r"\d GiB of weights, [\d,]+ tokens of context\)$", said[0])


def test_what_is_here_goes_before_a_download(tmp_path: Path, fetched: list[str]) -> None:
    here("llama-3.1-8b:q4_k_m", forge_gguf(tmp_path / "q4.gguf", LLAMA_8B))
    said: list[str] = []
    assert choose_form("llama-3.1-8b", gpu(24), on_message=said.append) == "llama-3.1-8b:q4_k_m"
    assert "which is here" in said[0]
    assert said[0].endswith("; llama-3.1-8b:full would also fit")
    here("llama-3.1-8b:q6_k", forge_gguf(tmp_path / "q6.gguf", LLAMA_8B, "Q6_K"))
    assert choose_form("llama-3.1-8b", gpu(24)) == "llama-3.1-8b:q6_k"
    assert choose_form("llama-3.1-8b", gpu(8)) == "llama-3.1-8b:q4_k_m", "it must fit, too"


def test_a_conversation_goes_before_bits(fetched: list[str]) -> None:
    """Somewhere from 8 to 11 GiB q6_k has room for some hundred tokens, and q4_k_m for a conversation."""
    entry = fits.load_manifest().models["llama-3.1-8b"]
    for step in range(60):
        gib = 8 + step / 20
        forms = {model.name: model.fit(gpu(gib)()) for model in fits.sized_versions(entry)}
        if forms["llama-3.1-8b:q6_k"].fits and not forms["llama-3.1-8b:q6_k"].fits_conversation:
            assert choose_form("llama-3.1-8b", gpu(gib)) == "llama-3.1-8b:q4_k_m"
            return
    raise AssertionError("no such size")


def test_the_next_form_is_tried_where_one_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def resolve(name: str, **options: Any) -> ModelFiles:
        tried.append(name)
        if len(tried) < 3:
            raise DownloadError(f"model {name} cannot be downloaded")
        return ModelFiles(name, Path(name), "a test")

    monkeypatch.setattr(fits, "resolve", resolve)
    said: list[str] = []
    assert choose_form("llama-3.1-8b", gpu(24), on_message=said.append) == "llama-3.1-8b:q6_k"
    assert tried == ["llama-3.1-8b", "llama-3.1-8b:q8_0", "llama-3.1-8b:q6_k"]
    assert said[0] == "model llama-3.1-8b cannot be downloaded; trying llama-3.1-8b:q8_0"
    assert "which is available" in said[2]
    tried[:] = []
    monkeypatch.setattr(fits, "resolve", lambda name, **options: (_ for _ in ()).throw(DownloadError("no network")))
    with pytest.raises(DownloadError, match="no network"):
        choose_form("llama-3.1-8b", gpu(24))


def test_other_names_stay_and_ask_for_no_memory(tiny_model: Path, fetched: list[str]) -> None:
    def no_budget() -> Budget:
        raise AssertionError("the memory is looked at")

    for name in ("smollm2-135m", str(tiny_model), "llama-3.1-8b:q8_0", "llama-3.1-8b:full", "org/model", "unknown"):
        assert choose_form(name, no_budget) == name
    assert fetched == []
    assert best_form(None, EngineConfig(device="cpu")) == "smollm2-135m"


def test_where_no_form_fits_the_name_stays(fetched: list[str]) -> None:
    assert choose_form("llama-3.1-8b", gpu(4)) == "llama-3.1-8b"
    assert fetched == []


def test_the_app_and_the_plain_chat_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both load the chosen quantization, and the app gets its name."""
    from minillm.cli.main import main
    from minillm.errors import MinillmError
    from minillm.service import __main__ as service
    from minillm.service.messages import Load, LoadFailed, Message, Notice

    def choose(name: str, config: EngineConfig, on_progress: Any, on_message: Any) -> str:
        on_message(f"taking {name}:x")
        return f"{name}:x"

    def load(name: str, *rest: Any) -> None:
        raise MinillmError(f"loading {name}")

    for module in ("minillm.loading.engine", "minillm.llm"):
        monkeypatch.setattr(f"{module}.load_engine", load)
    monkeypatch.setattr("minillm.loading.engine.best_form", choose)
    events: list[Message] = []
    inbox = service.Inbox()
    inbox.put(Load("m", {}))
    assert service.serve(inbox, events.append) == 1
    assert next(event for event in events if isinstance(event, Notice)).text == "taking m:x"
    assert next(event for event in events if isinstance(event, LoadFailed)).error == "loading m:x"
    said: list[str] = []
    monkeypatch.setattr("minillm.progress.say", said.append)
    assert main(["chat", "--plain", "--model", "m", "hello"]) == 1
    assert said == ["taking m:x"]


def test_the_memory_of_the_device_is_what_counts(monkeypatch: pytest.MonkeyPatch, fetched: list[str]) -> None:
    monkeypatch.setattr("minillm.loading.engine.known_rate", lambda device: 1e12)
    memory(monkeypatch, 9.5)
    assert best_form("llama-3.1-8b", EngineConfig(device="cpu")) == "llama-3.1-8b:q6_k"
    memory(monkeypatch, 64)
    assert best_form("llama-3.1-8b", EngineConfig(device="cpu")) == "llama-3.1-8b"
    assert best_form("llama-3.2-1b", EngineConfig(device="cpu", max_model_len=100_000)) == "llama-3.2-1b"
    monkeypatch.setattr("minillm.loading.engine.known_rate", lambda device: 20e9)
    assert best_form("llama-3.2-1b", EngineConfig(device="cpu")) == "llama-3.2-1b:q8_0", "at reading speed"
