"""Read a model's configuration and validate it before the weights are downloaded or opened."""

from pathlib import Path
from typing import Any

from minillm.errors import WeightsError
from minillm.model.config import ModelConfig
from minillm.text.reading import is_there, read_json
from minillm.weights.quantized import read_quantized

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of PEFT


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration of a model in Hugging Face's layout.

    Raises:
        WeightsError: the configuration is missing or invalid, or the architecture or quantization is not supported.
    """
    config = model_config(directory)
    if read_quantized(directory) is not None:
        config.pop("quantization_config", None)
    generation = directory / "generation_config.json"
    return ModelConfig.from_hf(config, read_json(generation) if is_there(generation) else {})


def model_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a directory. Raises WeightsError if it is missing, or the model is a LoRA adapter."""
    weights = {path.name for path in directory.glob("*.safetensors")} - {ADAPTER}
    if is_there(directory / ADAPTER_CONFIG) and not weights:
        raise WeightsError(
            f"{directory} is a LoRA adapter, which is not a whole model: merge it into its base model "
            "(PEFT's merge_and_unload) and load the result"
        )
    return read_json(directory / "config.json")
