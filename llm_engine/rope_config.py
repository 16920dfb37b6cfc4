"""Rotary embedding of a checkpoint as values: which of the known scalings, with which constants."""

import math
from dataclasses import dataclass

from llm_engine.config_fields import ConfigFields


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultRope:
    """Frequencies theta ** (-2i / head_dim)."""

    theta: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRope:
    """All frequencies divided by a factor (position interpolation)."""

    theta: float
    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Rope:
    """Long waves are interpolated, short ones kept, those between are blended (Llama 3.1)."""

    theta: float
    factor: float
    low_freq_factor: float  # waves longer than original context / this are interpolated
    high_freq_factor: float  # waves shorter than original context / this are kept; > low
    original_context_tokens: int  # of pretraining


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnRope:
    """Frequencies blended by the turns they make in the original context (arXiv 2309.00071)."""

    theta: float
    factor: float
    original_context_tokens: int
    beta_fast: float  # frequencies with more turns are kept
    beta_slow: float  # frequencies with fewer turns are interpolated
    attention_factor: float  # cosines and sines are multiplied by it
    truncate: bool  # round the blended range to whole frequencies


ROPE_FIELDS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",  # a note on how the checkpoint was made
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
    "type",
}
RopeConfig = DefaultRope | LinearRope | Llama3Rope | YarnRope


def read_rope_config(config: ConfigFields) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Raises:
        UnsupportedModel: If the type or a constant is not one that is implemented.
    """
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    rope = config.nested(name)
    for field in rope.names():
        # An extension that is overlooked, or settings nested by layer, would change the model.
        if field not in ROPE_FIELDS:
            raise rope.unsupported(field, "present", f"one of {', '.join(sorted(ROPE_FIELDS))}")
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    # The oldest files say `type`.
    rope_type = rope.string("rope_type", rope.string("type", "default"))
    for fields in (config, rope):
        if fields.has("partial_rotary_factor") and fields.number("partial_rotary_factor") != 1:
            found = fields.number("partial_rotary_factor")
            raise fields.unsupported("partial_rotary_factor", found, "1")
    match rope_type:
        case "default":
            return DefaultRope(theta=theta)
        case "linear":
            return LinearRope(theta=theta, factor=rope.number("factor"))
        case "llama3":
            return _read_llama3(rope, theta, config)
        case "yarn":
            return _read_yarn(rope, theta, config)
    raise rope.unsupported("rope_type", rope_type, "one of default, linear, llama3, yarn")


def _read_llama3(rope: ConfigFields, theta: float, config: ConfigFields) -> Llama3Rope:
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    if high <= low:
        raise rope.unsupported("high_freq_factor", high, f"above low_freq_factor ({low})")
    return Llama3Rope(
        theta=theta,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_tokens=_original_context(rope, config),
    )


def _read_yarn(rope: ConfigFields, theta: float, config: ConfigFields) -> YarnRope:
    original = _original_context(rope, config)
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    if rope.has("attention_factor"):
        attention_factor = rope.number("attention_factor")
    elif rope.has("mscale") and rope.has("mscale_all_dim"):
        attention_factor = _yarn_magnitude(factor, rope.number("mscale")) / _yarn_magnitude(
            factor, rope.number("mscale_all_dim")
        )
    else:
        attention_factor = _yarn_magnitude(factor, 1.0)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_context_tokens=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=rope.boolean("truncate", True),
    )


def _original_context(rope: ConfigFields, config: ConfigFields) -> int:
    default = config.integer("max_position_embeddings")
    return rope.integer("original_max_position_embeddings", default)


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
