"""Test wrong values in a model's files: each gives a model or one line, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lib.examples import examples
from lib.gguf_files import gguf_model, write_gguf
from lib.limits import bounded_memory
from lib.models import TINY, write_tiny_model
from minillm.config import EngineConfig
from minillm.errors import DownloadError, MinillmError, UsageError, WeightsError
from minillm.loading.engine import load_engine
from minillm.model.architectures import ARCHITECTURES
from minillm.weights.checkpoint import open_checkpoint
from minillm.weights.gguf_header import Header, read_header
from minillm.weights.manifest import load_manifest
from minillm.weights.resolve import resolve

ROOM = 3 << 30  # bytes that one attempt may take


def attempt(model: Path, max_model_len: int | None = 64) -> None:
    """Load a model as the engine does: any result but success or one line is a fault of ours."""
    config, said = EngineConfig(device="cpu", num_blocks=8, max_model_len=max_model_len), ""
    with bounded_memory(ROOM):
        try:
            load_engine(str(model), config)
        except MinillmError as error:
            said = str(error)
    assert "\n" not in said
    assert len(said) < 1000
    assert "not enough memory" not in said


NUMBERS: list[Any] = [0, -1, 1, 2, 3, 7, 64, 10**6, 10**9, 1 << 31, 1 << 60, 1 << 63, 10**400, 0.0, 0.5, 1e-300, 1e308]
NUMBERS += [math.nan, math.inf, -math.inf]
ODD: list[Any] = [None, True, False, "", "2", "x" * 5000, "a\0b", "\ud800", "../../x", "\x1b[2J", [], {}, [[]], [[2]]]
ODD += [["a"], {"a": {"b": [1]}}, [None], [1.5, "x"], [10**400], {"content": 5}, [{"name": ["default"]}]]
values = st.sampled_from([*NUMBERS, *ODD]) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
CONFIG_KEYS = [
    *(key for key in TINY if key != "pad_token_id"),
    *(
        "architectures",
        "model_type",
        "head_dim",
        "hidden_activation",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "hidden_act",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "dtype",
    ),
    *("sliding_window", "attention_bias", "mlp_bias", "tie_word_embeddings", "quantization_config"),
    *("partial_rotary_factor", "original_max_position_embeddings"),
    *("use_sliding_window", "max_window_layers", "layer_types", "no_rope_layers", "no_rope_layer_interval"),
]
ROPE_KEYS = [
    *("type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor"),
    *("long_factor", "frequency_factors", "amplitude", "partial_rotary_factor"),
]
GOOD_ROPE = {
    "factor": 4.0,
    "rope_theta": 10000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
KINDS = ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
OTHER_FILES = {
    "generation_config.json": [
        "eos_token_id",
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "do_sample",
        "min_p",
        "max_new_tokens",
        "no_repeat_ngram_size",
    ],
    "tokenizer_config.json": ["bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "tokenizer_class"],
    "special_tokens_map.json": ["bos_token", "eos_token"],
}
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@settings(RELAXED, max_examples=examples(250))
@given(
    kind=st.sampled_from([name.removesuffix("ForCausalLM") for name in ARCHITECTURES]),
    changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), values, min_size=1, max_size=2),
    max_model_len=st.sampled_from([64, None]),
)
@example(kind="Llama", changes={"eos_token_id": "2"}, max_model_len=64)
@example(kind="Llama", changes={"num_hidden_layers": 10**6}, max_model_len=64)
@example(kind="Llama", changes={"max_position_embeddings": 10**9}, max_model_len=None)
@example(kind="Llama", changes={"architectures": {"a": 1}}, max_model_len=64)
@example(kind="Qwen2", changes={"layer_types": [{}]}, max_model_len=64)
@example(kind="SmolLM3", changes={"no_rope_layers": [[]] * 3}, max_model_len=64)
@example(kind="SmolLM3", changes={"no_rope_layer_interval": math.nan}, max_model_len=64)
def test_config_json(copy: Path, model: Path, kind: str, changes: dict[str, Any], max_model_len: int | None) -> None:
    config = {"architectures": [f"{kind}ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
    write(copy / "config.json", {**json.loads((model / "config.json").read_text()), **config, **changes})
    attempt(copy, max_model_len)


@settings(RELAXED, max_examples=examples(250))
@given(
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(["rope_parameters", "rope_scaling"]),
    changes=st.dictionaries(st.sampled_from(ROPE_KEYS), values, min_size=1, max_size=2),
)
def test_rope_keys(copy: Path, model: Path, kind: str, layout: str, changes: dict[str, Any]) -> None:
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_parameters")
    write(copy / "config.json", {**config, layout: {"rope_type": kind, **GOOD_ROPE, **changes}})
    attempt(copy)


@settings(RELAXED, max_examples=examples(150))
@given(data=st.data())
def test_the_files_beside_it(copy: Path, model: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(OTHER_FILES)))
    changes = data.draw(st.dictionaries(st.sampled_from(OTHER_FILES[name]), values, min_size=1, max_size=2))
    path = model / name
    write(copy / name, {**(json.loads(path.read_text()) if path.exists() else {}), **changes})
    attempt(copy)
    (copy / name).unlink()


@settings(RELAXED, max_examples=examples(100))
@given(found=values)
def test_the_index(copy: Path, found: Any) -> None:
    for weight_map in (found, {"lm_head.weight": found}, {"lm_head.weight": "model.safetensors", "x": found}):
        write(copy / "model.safetensors.index.json", {"weight_map": weight_map})
        attempt(copy)


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Header, bytes]:
    """A sound file's header, and the bytes of its tensors."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, gguf_model(num_hidden_layers=1, vocab_size=40), gguf.GGMLQuantizationType.F16)
    header = read_header(path)
    start = min(info.offset for info in header.tensors.values())
    return header, path.read_bytes()[start:]


def text(value: str) -> bytes:
    data = value.encode(errors="replace")
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> tuple[int, bytes]:
    """A value's GGUF type and its bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return 4, struct.pack("<I", value)
        return (10, struct.pack("<Q", value % (1 << 64))) if value > 0 else (11, struct.pack("<q", value))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, str):
        return 8, text(value)
    kind = typed(value[0])[0] if value else 4
    items = [data for each_kind, data in map(typed, value) if each_kind == kind]
    return 9, struct.pack("<IQ", kind, len(items)) + b"".join(items)


def gguf_bytes(metadata: dict[str, Any], header: Header, data: bytes) -> bytes:
    start = min(info.offset for info in header.tensors.values())
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(header.tensors), len(metadata))]
    for key, value in metadata.items():
        kind, encoded = typed(value)
        parts += [text(key), struct.pack("<I", kind), encoded]
    for name, info in header.tensors.items():
        shape = list(reversed(info.shape))
        parts += [text(name), struct.pack("<I", len(shape)), struct.pack(f"<{len(shape)}Q", *shape)]
        parts += [struct.pack("<IQ", info.type, info.offset - start)]
    whole = b"".join(parts)
    return whole + b"\0" * (-len(whole) % 32) + data


SCALINGS = [f"llama.rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "original_context_length")]
SCALINGS += [f"llama.rope.scaling.yarn_{name}" for name in ("ext_factor", "attn_factor", "beta_fast", "log_multiplier")]
TOKENIZER = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")]
TOKENIZER += ["tokenizer.ggml.add_bos_token", "tokenizer.ggml.scores", "tokenizer.chat_template"]
MORE_KEYS = [
    *("general.alignment", "split.count", "llama.rope.scale_linear", "llama.vocab_size", "llama.expert_count"),
    *("llama.attention.key_length", "llama.rope.dimension_count", *SCALINGS, *TOKENIZER),
]
gguf_values = st.sampled_from([v for v in [*NUMBERS, *ODD] if v is not None and not isinstance(v, (dict, list))])
gguf_values |= st.sampled_from(["linear", "yarn", "llama", "gpt2", "default", [2], ["a", "a"], [1.0], [2**40], [True]])


@settings(RELAXED, max_examples=examples(300))
@given(data=st.data())
def test_gguf_metadata(tmp_path: Path, small_gguf: tuple[Header, bytes], data: st.DataObject) -> None:
    header, tensors = small_gguf
    keys = st.sampled_from([*header.metadata, *MORE_KEYS])
    changes = data.draw(st.dictionaries(keys, gguf_values, min_size=1, max_size=2))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({**header.metadata, **changes}, header, tensors))
    attempt(path)


def test_a_long_text_under_any_gguf_key_ends_in_a_short_line(tmp_path: Path, small_gguf: tuple[Header, bytes]) -> None:
    header, tensors = small_gguf
    path = tmp_path / "m.gguf"
    for key in {*header.metadata, *MORE_KEYS}:
        path.write_bytes(gguf_bytes({**header.metadata, key: "x" * 5000}, header, tensors))
        attempt(path)


def test_the_sound_models_load(copy: Path, tmp_path: Path, small_gguf: tuple[Header, bytes]) -> None:
    header, tensors = small_gguf
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(header.metadata, header, tensors))
    for sound in (copy, path):
        load_engine(str(sound), EngineConfig(device="cpu", num_blocks=8, max_model_len=64))


@pytest.mark.parametrize("kind", [8, 0])
def test_an_array_that_would_grow_in_memory_is_refused(tmp_path: Path, kind: int) -> None:
    """A byte of a file becomes eight of a list, an empty string sixty."""
    path = tmp_path / "m.gguf"
    count = 1 << 26
    with path.open("wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, kind, count))
        stream.truncate(count * 8 + 100)
    with bounded_memory(ROOM), pytest.raises(WeightsError, match="elements"):
        read_header(path)


# --- files that are not models ----------------------------------------------------------------------------------------

FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
FILES += ["model.safetensors.index.json", "chat_template.jinja", "special_tokens_map.json"]


def stand_in(path: Path, kind: str) -> None:
    if path.exists():
        path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)


@pytest.mark.parametrize("kind", ["directory", "pipe", "/dev/zero"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_named_and_not_waited_for(copy: Path, name: str, kind: str) -> None:
    stand_in(copy / name, kind)
    with pytest.raises(WeightsError, match=f"{name}: this is not a regular file"):
        load_engine(str(copy), EngineConfig(device="cpu", num_blocks=8))


def test_a_file_longer_than_any_is_not_read(copy: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        kept = (copy / name).read_bytes()
        with (copy / name).open("r+b") as stream:
            stream.truncate(1 << 40)
        with pytest.raises(WeightsError, match="more than"):
            load_engine(str(copy), EngineConfig(device="cpu", num_blocks=8))
        (copy / name).write_bytes(kept)


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_a_source_of_the_manifest_that_is_no_file(tmp_path: Path, kind: str) -> None:
    stand_in(tmp_path / "m.gguf", kind)
    manifest = tmp_path / "weights.toml"
    manifest.write_text(
        'default = "m"\n[models.m]\ndescription = "d"\nparameters = "1"\nlicense = "l"\nsize = 1\n'
        'sources = [{ path = "m.gguf" }]\n'
    )
    files = resolve("m", manifest=load_manifest(manifest))
    with pytest.raises(WeightsError, match="not a regular file"):
        open_checkpoint(files)
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(DownloadError, match="no such file"):
        resolve("m", manifest=load_manifest(manifest))


@pytest.mark.parametrize("name", ["x" * 5000, "/" + "x" * 5000, "a\0b", "~nosuchuser/m.gguf", "\ud800", "/dev/zero/x"])
def test_names_that_are_no_paths_are_said(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["directory", "pipe", "/dev/zero"])
def test_a_manifest_that_is_no_file_is_said(tmp_path: Path, kind: str) -> None:
    stand_in(tmp_path / "weights.toml", kind)
    with pytest.raises(UsageError, match="not a regular file"):
        load_manifest(tmp_path / "weights.toml")
