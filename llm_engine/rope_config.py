"""The rotary embedding of a checkpoint: one of the known scalings, with its constants."""

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
    """Long waves are interpolated, short ones kept, those in between blended (Llama 3.1)."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorsRope:
    """Each frequency divided by its own factor, GGUF's form of Llama 3.1's scaling."""

    theta: float
    factors: tuple[float, ...]  # head_dim / 2 of them


ROPE_TYPES = ("default", "linear", "llama3", "yarn", "factors")
ROPE_FIELDS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "factors",
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
RopeConfig = DefaultRope | LinearRope | Llama3Rope | YarnRope | FactorsRope


def read_rope_config(config: ConfigFields) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    If a file has both, `rope_scaling` wins, as in transformers.

    Raises:
        UnsupportedModel: If the type or a constant is not implemented.
    """
    rope = config.nested("rope_scaling" if config.value("rope_scaling") else "rope_parameters")
    # The oldest files say `type`.
    rope_type = rope.string("rope_type", rope.string("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise rope.unsupported("rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    for field in rope.names():
        # An ignored extension, or settings nested by layer, would change the model.
        if field not in ROPE_FIELDS:
            raise rope.unsupported(field, "present", f"one of {', '.join(sorted(ROPE_FIELDS))}")
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    for fields in (config, rope):
        if fields.has("partial_rotary_factor") and fields.number("partial_rotary_factor") != 1:
            found = fields.number("partial_rotary_factor")
            raise fields.unsupported("partial_rotary_factor", found, "1")
    match rope_type:
        case "linear":
            return LinearRope(theta=theta, factor=rope.number("factor"))
        case "llama3":
            return _read_llama3(rope, theta, config)
        case "yarn":
            return _read_yarn(rope, theta, config)
        case "factors":
            return FactorsRope(theta=theta, factors=rope.numbers("factors"))
        case _:
            return DefaultRope(theta=theta)


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
    if theta <= 1:  # turns would not decrease with the frequency's index
        raise rope.unsupported("rope_theta", theta, "above 1")
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
        truncate=rope.boolean("truncate", not rope.is_null("truncate")),
    )


def _original_context(rope: ConfigFields, config: ConfigFields) -> int:
    name = "original_max_position_embeddings"
    # At the top level, where Phi-3 has it, it wins.
    fields = config if config.has(name) else rope
    return fields.integer(name, config.integer("max_position_embeddings"))


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
