"""Describe a model, and its draft model, before their weights are read."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from minillm.config import EngineConfig
from minillm.errors import MinillmError, UsageError
from minillm.fit.budget import Budget
from minillm.fit.sizes import shape_of
from minillm.fit.weights import QUANTIZED, weights_in_memory
from minillm.loading.device import choose_dtype
from minillm.model.architectures import text_name
from minillm.model.config import ModelConfig, ignored_settings
from minillm.model.llama_tensors import LlamaTensors
from minillm.model.loader import TensorSource, parameter_shapes
from minillm.model.random_tensors import RandomTensors
from minillm.model.shapes import SHAPES
from minillm.progress import OnMessage, OnProgress, ignore_message, ignore_progress
from minillm.text.tokenizer import Tokenizer
from minillm.weights.accepted import read_config
from minillm.weights.checkpoint import open_checkpoint
from minillm.weights.files import identity_of
from minillm.weights.resolve import resolve
from minillm.weights.stored import StoredTensor

_ROUNDED = {"q4_0": "int4", "q8_0": "int8"}  # names of random weights' quantizations -> names that --quantize takes


@dataclass(frozen=True)
class Description:
    """A model before its weights are read.

    ``open_source(device)`` opens the weights. ``served_by`` describes their origin, such as a hub repository.
    """

    name: str
    config: ModelConfig
    tensors: tuple[StoredTensor, ...]  # names, shapes and types as in the files
    open_source: Callable[[torch.device], TensorSource]
    served_by: str
    tokenizer: Tokenizer | None
    identity: str = ""  # differs between models with other weights


def describe(
    name: str,
    config: EngineConfig,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = ignore_message,
) -> Description:
    if config.load_format == "auto":
        files = resolve(name, on_progress=on_progress, on_message=on_message)
        checkpoint = open_checkpoint(files)
        model = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        if ignored := ignored_settings(checkpoint.generation_config):
            on_message(f"generation_config.json: {', '.join(ignored)} not supported, so answers ignore it")
        tokenizer = Tokenizer.load(checkpoint.tokenizer_source, model.vocab_size)
        tensors = LlamaTensors(checkpoint, model)
        stored = tuple(
            StoredTensor(key, tensors.shape(key), checkpoint.stored_as(tensors.stored_name(key)))
            for key in tensors.names()
        )
        if of_images := sum(text_name(key) is None for key in checkpoint.names()):
            on_message(f"{name}: only the language model is loaded; {of_images} tensors for images are ignored")
        return Description(name, model, stored, lambda device: tensors, files.source, tokenizer, identity_of(files))
    model, tokenizer = _without_weights(name, on_progress, on_message)
    stored = tuple(StoredTensor(key, shape, "BF16") for key, shape in parameter_shapes(model))
    form = config.load_format.partition(":")[2] or None

    def random_tensors(device: torch.device) -> RandomTensors:
        return RandomTensors(model, device, config.seed, form)

    identity = f"random {form} {config.seed}"
    return Description(name, model, stored, random_tensors, "random weights", tokenizer, identity)


def _without_weights(name: str, on_progress: OnProgress, on_message: OnMessage) -> tuple[ModelConfig, Tokenizer | None]:
    """Return the configuration of a model that gets random weights, and its tokenizer or None.

    ``name`` is in `SHAPES`, or names a model as elsewhere. If it is a directory, it needs only a config.json.
    """
    if name in SHAPES:
        return SHAPES[name], None
    files = resolve(name, on_progress=on_progress, on_message=on_message)
    if files.path.is_dir():
        config = read_config(files.path)
        return config, Tokenizer.load(files.path, config.vocab_size)
    checkpoint = open_checkpoint(files)
    config = ModelConfig.from_hf(checkpoint.config)
    return config, Tokenizer.load(checkpoint.tokenizer_source, config.vocab_size)


@dataclass(frozen=True)
class Draft:
    """A draft model before its weights are read, with its load options."""

    description: Description
    config: EngineConfig

    def reserve(self, budget: Budget) -> Budget:
        """Return ``budget`` with this draft model's memory reserved. The main model can use the rest."""
        layout = replace(budget, config=self.config).layout()
        return budget.with_draft(weights_in_memory(self.description.tensors, layout), shape_of(self.description.config))


def describe_draft(
    model: Description,
    config: EngineConfig,
    device: torch.device,
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = ignore_message,
) -> Draft | None:
    """Describe the draft model that ``config.speculate`` names. Return None if it names no model.

    Raises:
        MinillmError: there is no such model, or its vocabulary differs from that of ``model``.
    """
    if config.draft is None:
        return None
    random, (name, _, kind) = config.load_format != "auto", config.draft.rpartition(":")
    kind = _ROUNDED.get(kind, kind) if random else kind
    if kind not in QUANTIZED:
        name, kind = config.draft, ""
    own = replace(
        config, speculate="off", quantize=None, weights="stored", load_format="dummy" if random else "auto",
        deterministic=False,  # draft tokens never change the output
    )  # fmt: skip
    if device.type == "cuda":
        own = replace(own, quantize=kind or None)
    elif kind in ("", "int8") and choose_dtype(config, device) == torch.float32:
        own = replace(own, weights="int8")  # draft tokens need not be exact
    elif kind:
        raise UsageError(f"speculate {config.draft}: {kind} needs a GPU; on a CPU drafts of float32 models are int8")
    try:
        draft = describe(name, own, on_progress, on_message)
    except MinillmError as error:
        raise type(error)(f"speculate must be off, lookup or a model: {error}") from None
    if problem := _unfit(draft, model):
        raise UsageError(f"speculate {config.draft}: it cannot draft for {model.name}: {problem}")
    return Draft(draft, own)


def _unfit(draft: Description, model: Description) -> str | None:
    """Return the reason why ``draft`` cannot propose tokens for ``model``, or None if it can."""
    if draft.config.num_parameters > model.config.num_parameters:
        sizes = [f"{each.config.num_parameters / 1e6:,.0f} million" for each in (draft, model)]
        return f"it is the larger one, {sizes[0]} parameters and {sizes[1]}; name a smaller or a quantized model"
    if draft.tokenizer is None or model.tokenizer is None:
        same = draft.tokenizer is model.tokenizer and draft.config.vocab_size == model.config.vocab_size
        return None if same else "it is unknown whether their tokens are the same"
    difference = model.tokenizer.difference(draft.tokenizer)
    return difference and f"their tokens differ: {difference}"
