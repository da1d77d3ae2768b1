"""Small random models, in transformers, in ours and as files, and the default model in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from minillm.kernels.cpu.linear import FBGEMM
from minillm.model.calibration import calibrate_int8
from minillm.model.config import ModelConfig
from minillm.model.llama import Llama
from minillm.model.llama_tensors import LlamaTensors
from minillm.model.loader import load_llama
from minillm.model.rounded_tensors import RoundedTensors
from minillm.speculation import method as speculation
from minillm.storage import Storage

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where our side runs

if DEVICE.type == "cuda":
    speculation._HOST_BYTES = 0  # the models of tests are so small that no guess would pay for the host's time

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class StateDict:
    """Tensors of a transformers model, as a source for our loader."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        part = self.tensors[name][rows or slice(None)]
        return part if columns is None else part[:, columns]

    def low_bit(self, name: str, device: torch.device, rows: slice | None, columns: slice | None) -> None:
        """All tensors are numbers."""


def hf_model(seed: int = 0, kind: str = "Llama", **overrides: Any) -> Any:
    """Return a small random transformers model with logits far from flat. A Llama, whose layers are alike, has two."""
    import transformers

    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    layers = {"num_hidden_layers": 2} if kind == "Llama" else {}
    config = config_class(**{**TINY, **layers, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif parameter.dim() == 2:
                parameter.mul_(6)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def ours(model: Any, *, max_positions: int | None = None, dtype: torch.dtype = torch.float32) -> Llama:
    """Return our model with the same weights."""
    config = ModelConfig.from_hf(model.config.to_dict())
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    return load_llama(
        LlamaTensors(StateDict(tensors), config),
        config,
        device=DEVICE,
        dtype=dtype,
        max_positions=max_positions or config.max_position_embeddings,
    )


needs_products_of_8_bits = pytest.mark.skipif(
    torch.backends.quantized.engine not in FBGEMM, reason="torch has no products of 8 bits here"
)


def in_4_bits(storage: Storage = "int8", **changes: Any) -> Llama:
    """Return a small random model on a CPU, with matrices of 4 bits in its checkpoint."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = hf_model(**{**sizes, "head_dim": 16, **changes})
    config = ModelConfig.from_hf(model.config.to_dict())
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    loaded = load_llama(
        RoundedTensors(LlamaTensors(StateDict(tensors), config), "int4"),
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_positions=256,
        weights=storage,
    )
    calibrate_int8(loaded, 64)
    return loaded


def noisy(model: Any, noise: float, seed: int = 1) -> Llama:
    """Our model of a transformers model's weights with noise: it is often, and not always, of the same mind."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, tensor in model.state_dict().items():
        if not (model.config.tie_word_embeddings and name == "lm_head.weight"):
            deviation = tensor.std() if tensor.dim() > 1 else 0.0
            tensors[name] = tensor + noise * deviation * torch.randn(tensor.shape, generator=generator)
    config = ModelConfig.from_hf(model.config.to_dict())
    source, longest = LlamaTensors(StateDict(tensors), config), config.max_position_embeddings
    return load_llama(source, config, device=DEVICE, dtype=torch.float32, max_positions=longest)


def write_tiny_model(directory: Path, *, max_positions: int = 512) -> Path:
    """Write a chat model of a few thousand parameters, with tokenizer and chat template, as transformers does."""
    from lib.tokens import CHATML, byte_level

    byte_level(directory, template=CHATML)
    return _with_weights(directory, max_positions)


def write_sentencepiece_model(directory: Path) -> Path:
    """Write a tiny model with a tokenizer in SentencePiece's style."""
    from lib.tokens import sentencepiece

    return _with_weights(sentencepiece(directory), 512)


def _with_weights(directory: Path, max_positions: int) -> Path:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    eos = backend.token_to_id("<|im_end|>") or backend.token_to_id("</s>")
    shape: dict[str, Any] = {"num_hidden_layers": 3, "vocab_size": 640, "max_position_embeddings": max_positions}
    hf_model(**shape, eos_token_id=eos).save_pretrained(directory)
    return directory


def default_model_of_transformers() -> Any:
    """Return the transformers model of the downloaded default weights, in float32."""
    import transformers

    from minillm.weights.files import find_downloaded

    files = find_downloaded("smollm2-135m")
    assert files is not None
    return transformers.AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()
