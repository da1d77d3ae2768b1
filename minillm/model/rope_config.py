"""The settings of the rotary embedding in a config.json, with all supported kinds of scaling."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm.errors import WeightsError
from minillm.model.architecture_keys import FULL, WINDOWED
from minillm.model.architectures import Architecture
from minillm.text.reading import Values
from minillm.text.safe import clean_line

TYPES = ("default", "linear", "dynamic", "proportional", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling beyond the trained context.

    Attributes:
        theta: the base of the frequencies.
        dims: the number of dimensions of a head that rotate, counted from its first; 0 means all.
        has_adjacent_pairs: in the checkpoint, the two dimensions of a rotary pair are adjacent.
        type: the kind of scaling, by its Hugging Face name.
        factor: the scaling factor.
        original_max_position_embeddings: the context in tokens before scaling, if the type needs it.
        options: the scaling type's other parameters, by their Hugging Face names (``low_freq_factor``, ``beta_fast``,
            …).
        short_factor, long_factor: with ``longrope``, a divisor of each frequency: for sequences within the original
            context, and for longer ones.
        frequency_factors: additional divisors of the frequencies, one per pair of dimensions. GGUF files store llama3
            scaling this way.
        amplitude: an additional factor on cos and sin (GGUF's ``rope.scaling.attn_factor``).
    """

    theta: float
    dims: int = 0
    has_adjacent_pairs: bool = False
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    options: Mapping[str, float] = field(default_factory=dict)
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    frequency_factors: tuple[float, ...] | None = None
    amplitude: float = 1.0


def _stretch(kind: str, rope: Values, config: Values, context: int, pairs: int) -> dict[str, Any]:
    """Return the fields of `RopeConfig` that the scaling type ``kind`` needs.

    ``context`` is the model's context in tokens. ``pairs`` is the number of rotary pairs in a head.
    """

    def optional(*keys: str) -> dict[str, float]:
        return {key: rope.number(key) for key in keys if rope.has(key)}

    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"factor": rope.positive("factor")}
    if kind == "proportional":
        share = config.number("partial_rotary_factor", 1.0, most=1.0)
        share = rope.number("partial_rotary_factor", share, most=1.0)
        return {"factor": rope.positive("factor", 1.0), "options": {"partial_rotary_factor": share}}
    # The context before scaling. A top-level value overrides the one in the rope settings, as in transformers.
    key = "original_max_position_embeddings"
    original = (config if config.has(key) else rope).integer(key, context)
    if kind == "llama3":
        options = {each: rope.positive(each) for each in ("low_freq_factor", "high_freq_factor")}
        return {key: original, "factor": rope.positive("factor"), "options": options}
    if kind == "yarn":
        options = optional("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        options["truncate"] = rope.flag("truncate", True)
        # If the factor is null, it is the ratio of the two contexts. A missing key is an error.
        factor = context / original if "factor" in rope.values and not rope.has("factor") else None
        return {key: original, "factor": rope.positive("factor", factor), "options": options}
    divisors = {each: rope.numbers(each, pairs) for each in ("short_factor", "long_factor")}
    factor = rope.positive("factor", context / original)
    return {key: original, "factor": factor, "options": optional("attention_factor"), **divisors}


def read_ropes(
    config: Values, context: int, head_dim: int, architecture: Architecture
) -> tuple[RopeConfig, RopeConfig | None]:
    """Read the settings of the rotary embedding in a config.json, in the new layout ``rope_parameters`` or the old one
    ``rope_scaling``.

    Keys that a scaling type does not use (such as ``finetuned``) are ignored, as in transformers. ``context`` is the
    model's context in tokens.

    Returns:
        The settings for layers without a window; the settings for layers with a window, or None if all layers have the
            same settings.

    Raises:
        WeightsError: a value is missing, invalid or unsupported.
    """
    if not architecture.has_two_ropes:
        return _read_rope(config, context, head_dim, architecture), None
    by_kind, given = config.part("rope_parameters"), dict(config.values)
    is_nested = any(isinstance(by_kind.values.get(kind), Mapping) for kind in (FULL, WINDOWED))
    if is_nested:
        given["rope_parameters"] = dict(by_kind.part(FULL).values)
    local = {"rope_type": "default", "rope_theta": given.get("rope_local_base_freq") or given.get("rope_theta")}
    if is_nested:
        local |= by_kind.part(WINDOWED).values
    given_local = {**given, "rope_scaling": None, "rope_parameters": local}
    full, windowed = (
        _read_rope(Values(config.where, each), context, head_dim, architecture) for each in (given, given_local)
    )
    if windowed.type in ("dynamic", "longrope"):
        raise WeightsError(f"{config.where}: rope type {windowed.type} of layers with a window is not supported")
    return full, windowed


def _read_rope(config: Values, context: int, head_dim: int, architecture: Architecture) -> RopeConfig:
    rope = config.part("rope_parameters")
    if rope.values and config.part("rope_scaling").values:
        raise WeightsError(f"{config.where}: both rope_parameters and rope_scaling are given; remove one")
    rope = rope if rope.values else config.part("rope_scaling")
    if nested := next((key for key, value in rope.values.items() if isinstance(value, Mapping)), None):
        raise WeightsError(f"{rope.where}: settings per kind of layer ({clean_line(nested, 60)}) are not supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in TYPES:
        raise WeightsError(
            f"{config.where}: rope type {clean_line(repr(kind), 60)} is not supported; supported: {', '.join(TYPES)}"
        )
    key, dims = "partial_rotary_factor", head_dim
    values = rope if rope.has(key) else config
    if kind != "proportional" and (share := values.number(key, 1.0, most=1.0)) != 1.0:
        if not architecture.has_partial_rope:
            raise WeightsError(f"{values.where}: {key} other than 1 is not supported")
        dims = int(head_dim * share)
    if dims < 2 or dims % 2 or (head_dim - dims) % 2:
        raise WeightsError(f"{config.where}: {key} rotates {dims} of {head_dim} dimensions, not pairs")
    theta = rope if "rope_theta" in rope.values else config
    base = theta.positive("rope_theta") if "rope_theta" in theta.values else 10_000.0
    if kind == "dynamic" and architecture.has_rope_alpha and rope.number("alpha", 0.0):
        kind, base = "default", base * rope.number("alpha") ** (head_dim / max(1, head_dim - 2))
    return RopeConfig(
        # The default is 10,000: Llama 1 and 2 were saved before the key existed.
        theta=base,
        dims=0 if dims == head_dim else dims,
        has_adjacent_pairs=architecture.has_adjacent_pairs,
        type=kind,
        frequency_factors=rope.numbers("frequency_factors", dims // 2) if rope.has("frequency_factors") else None,
        amplitude=rope.positive("amplitude", 1.0),
        **_stretch(kind, rope, config, context, dims // 2),
    )
