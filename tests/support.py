"""Helpers of several test files: small random models, the transformers oracle, and an engine around them."""

from __future__ import annotations

import contextlib
import os
import random
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch
from torch import Tensor

from minillm.cache import BlockManager, SwapSpace, check
from minillm.engine.engine import Engine
from minillm.engine.requests import Requests
from minillm.engine.scheduler import Scheduler
from minillm.forms import Held
from minillm.kernels import Costs
from minillm.kernels.attention.plan import FREE
from minillm.kernels.cpu.linear import FBGEMM
from minillm.loading.engine import methods_for
from minillm.model.config import ModelConfig
from minillm.model.llama import Batch, Llama
from minillm.model.loader import load_llama
from minillm.model.rounded_tensors import RoundedTensors
from minillm.model.settle import settle
from minillm.outputs import RequestOutput
from minillm.runner.device_runner import DeviceRunner
from minillm.runner.runner import Runner
from minillm.speculation import method as speculation
from minillm.speculation.drafter import Drafter

if TYPE_CHECKING:
    from minillm.text.tokenizer import Tokenizer

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
    """A small random transformers model whose logits are far from flat."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**TINY, **overrides})
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
    """The same weights in our model."""
    config = ModelConfig.from_hf(model.config.to_dict())
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    return load_llama(
        StateDict(tensors),
        config,
        device=DEVICE,
        dtype=dtype,
        max_positions=max_positions or config.max_position_embeddings,
    )


needs_products_of_8_bits = pytest.mark.skipif(
    torch.backends.quantized.engine not in FBGEMM, reason="torch has no products of 8 bits here"
)


def in_4_bits(held: Held = "int8", **changes: Any) -> Llama:
    """A small random model on a CPU whose matrices have 4 bits in its checkpoint."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = hf_model(**{**sizes, "head_dim": 16, "num_hidden_layers": 3, **changes})
    config = ModelConfig.from_hf(model.config.to_dict())
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    loaded = load_llama(
        RoundedTensors(StateDict(tensors), "int4"),
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_positions=256,
        weights=held,
    )
    settle(loaded, 64)
    return loaded


def noisy(model: Any, noise: float, seed: int = 1) -> Llama:
    """Our model of a transformers model's weights with noise: it is often, and not always, of the same mind."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, tensor in model.state_dict().items():
        if not (model.config.tie_word_embeddings and name == "lm_head.weight"):
            deviation = tensor.std() if tensor.dim() > 1 else 0.0
            tensors[name] = tensor + noise * deviation * torch.randn(tensor.shape, generator=generator)
    config = ModelConfig.from_hf(model.config.to_dict())
    return load_llama(
        StateDict(tensors), config, device=DEVICE, dtype=torch.float32, max_positions=config.max_position_embeddings
    )


def write_tiny_model(directory: Path, *, max_positions: int = 512) -> Path:
    """A chat model of a few thousand parameters, with a tokenizer and a chat template, as transformers saves them."""
    from test_chat_template import CHATML
    from test_tokenizer import byte_level

    byte_level(directory, template=CHATML)
    return _with_weights(directory, max_positions)


def write_sentencepiece_model(directory: Path) -> Path:
    """Write a tiny model with a tokenizer in SentencePiece's style."""
    from test_tokenizer import sentencepiece

    return _with_weights(sentencepiece(directory), 512)


def _with_weights(directory: Path, max_positions: int) -> Path:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    eos = backend.token_to_id("<|im_end|>") or backend.token_to_id("</s>")
    hf_model(vocab_size=640, max_position_embeddings=max_positions, eos_token_id=eos).save_pretrained(directory)
    return directory


def engine_for(
    model: Llama,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 64,
    tokenizer: Tokenizer | None = None,
    eos: frozenset[int] = frozenset(),
    seed: int = 0,
    prefix_caching: bool = True,
    host_blocks: int = 0,
    admission: str = "predicted",
    on_device: bool | None = None,
    sharing: Costs | None = FREE,
    speculate: str = "off",
    draft: Llama | None = None,
) -> Engine:
    """An engine of its own; ``on_device`` keeps the state of decoding sequences there (by default: on a GPU).

    On the device, blocks that sequences share are always read once, unless ``sharing`` says otherwise. A
    ``draft`` model guesses.
    """
    cache = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
    scheduler = Scheduler(cache, max_num_seqs, max_num_batched_tokens, SwapSpace(host_blocks), admission)
    max_model_len = min(model.rotary.cos.shape[0], num_blocks * block_size)
    dynamic, on_gpu = model.rotary.dynamic, model.device.type == "cuda"
    sizes = (num_blocks, block_size, host_blocks)

    def new_runner(model: Llama, sharing: Costs | None) -> Runner:
        if not (on_gpu if on_device is None else on_device) or model.rotary.dynamic:
            return Runner(model, *sizes)
        return DeviceRunner(
            model, *sizes, max_num_seqs=max_num_seqs, max_model_len=max_model_len, graphs=on_gpu, sharing=sharing
        )

    runner = new_runner(model, sharing)
    if draft is not None:
        drafter = Drafter(new_runner(draft, None), num_blocks, host_blocks, model, max_num_batched_tokens)
        drafter.price = 0.05  # as of a small one
        runner.observers.append(drafter)
        speculate = "a model"
    plain = model.config.max_position_embeddings if dynamic else None
    requests = Requests(scheduler, tokenizer, model.config.vocab_size, max_model_len, eos, plain)
    return Engine(runner, requests, methods_for(requests, runner, seed, speculate))


def logits_in_chunks(model: Llama, token_ids: list[int], chunks: list[int], block_size: int = 4) -> Tensor:
    """Logits of every position, ``[tokens, vocab]``, computed in ``chunks`` over a shuffled, NaN-filled pool."""
    num_blocks = 2 * (-(-len(token_ids) // block_size))
    kv_cache = model.new_kv_cache(num_blocks, block_size)
    for tensor in kv_cache.tensors:
        tensor.fill_(99 if tensor.dtype == torch.int8 else float("nan"))
    device = model.device
    blocks = random.Random(0).sample(range(num_blocks), num_blocks // 2)
    assert sum(chunks) == len(token_ids)
    rows, start = [], 0
    for count in chunks:
        positions = list(range(start, start + count))
        decode = count == 1 and start > 0
        batch = Batch(
            token_ids=torch.tensor(token_ids[start : start + count], device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(
                [blocks[i // block_size] * block_size + i % block_size for i in positions], device=device
            ),
            block_tables=torch.tensor([blocks], dtype=torch.int32, device=device),
            context_lens=torch.tensor([start + count], dtype=torch.int32, device=device),
            num_decodes=1 if decode else 0,
            cu_seqlens=torch.tensor([0] if decode else [0, count], dtype=torch.int32, device=device),
            logit_rows=torch.arange(count, device=device),
            rope_lengths=[len(token_ids)] * count if model.rotary.dynamic else None,
        )
        with torch.inference_mode():
            rows.append(model.forward(batch, kv_cache))
        start += count
    return torch.cat(rows).cpu()


def run(engine: Engine, requests: list[tuple[list[int], Any]]) -> list[RequestOutput]:
    """Run requests together; the books are checked after every step, and everything must be back at the end."""
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    outputs = {}
    while engine.has_work:
        engine.step()
        check(engine.cache)
        engine.scheduler.swap.check()
        outputs.update({output.request_id: output for output in engine.take_finished()})
    assert engine.cache.num_free == engine.cache.num_blocks, "blocks leaked"
    assert engine.scheduler.swap.num_free == engine.scheduler.swap.num_blocks, "host blocks leaked"
    return [outputs[str(number)] for number in range(len(requests))]


def default_model_of_transformers() -> Any:
    """transformers on the downloaded default weights, float32."""
    import transformers

    from minillm.weights.files import find_downloaded

    files = find_downloaded("smollm2-135m")
    assert files is not None
    return transformers.AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()


@contextlib.contextmanager
def bounded_memory(room: int) -> Iterator[None]:
    """Let this process take ``room`` bytes of address space more than now, and no more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
