"""``minillm show``: what there is to know about a model, without loading its weights."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from minillm.cli.models import row
from minillm.progress import size
from minillm.system import import_torch
from minillm.text.safe import clean_line
from minillm.user_config import read_config
from minillm.weights.files import ModelFiles, size_on_disk
from minillm.weights.manifest import ModelEntry, load_manifest
from minillm.weights.resolve import describe, find


def run(arguments: argparse.Namespace) -> int:
    name, manifest = read_config(arguments.config).choose_model(arguments.model), load_manifest()
    found = find(name, manifest)
    if isinstance(found, ModelEntry):
        facts = {**row(found, None), "source": ", or ".join(map(describe, found.sources))}
    else:
        facts = row(manifest.models.get(name) or ModelEntry.unlisted(name), found)
        facts |= {key: value for key, value in _details(found).items() if value}
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    facts |= {"size": size(facts["size"]) if facts["size"] else "", "gated": "yes" if facts["gated"] else ""}
    facts["path"] = facts["path"] or "not downloaded"
    for key, value in facts.items():
        if value not in ("", None):
            shown = (
                "yes" if value is True else "no" if value is False else f"{value:,}" if type(value) is int else value
            )
            print(f"{key.replace('_', ' '):22}{clean_line(shown, 300)}")
    return 0


def _details(files: ModelFiles) -> dict[str, Any]:
    """What the files themselves say.

    Raises:
        WeightsError: they are damaged, or of a kind that is not supported.
    """
    import_torch()
    from minillm.model.config import ModelConfig
    from minillm.text.tokenizer import Tokenizer
    from minillm.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(files)
    config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config, max_model_len=1)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source, config.vocab_size)
    stored: Counter[str] = Counter()
    for name in checkpoint.names():
        stored[checkpoint.stored_as(name)] += math.prod(checkpoint.shape(name))
    shares = [(kind, count / stored.total()) for kind, count in stored.most_common()]
    source = checkpoint.tokenizer_source
    return {
        "license": str(source.get("general.license", "")) if isinstance(source, Mapping) else "",
        "size": size_on_disk(files.path),
        "parameters": f"{config.num_parameters / 1e6:,.0f}M",
        "stored_as": ", ".join(f"{kind} ({share:.0%})" for kind, share in shares if share >= 0.005),
        "context": config.longest_context,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_heads}, with {config.num_kv_heads} of keys and values",
        "vocabulary": config.vocab_size,
        "cache_per_token": f"{size(config.kv_bytes_per_token(2))} in 16 bits",
        "chat_template": tokenizer is not None and tokenizer.has_chat_template,
    }
