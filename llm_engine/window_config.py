"""The sliding window of a checkpoint: one for all layers, or none."""

from llm_engine.config_fields import ConfigFields

LAYER_TYPES = frozenset(
    {
        "attention",  # the former name of full attention
        "full_attention",
        "sliding_attention",
    }
)
QWEN = ("qwen2", "qwen3")  # have use_sliding_window and max_window_layers

# Defaults of transformers where a key is missing
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def read_sliding_window(
    fields: ConfigFields, family: str, *, num_layers: int, max_context_tokens: int
) -> int | None:
    """Return how many tokens each token sees, itself included; None: all before it.

    Raises:
        UnsupportedModel: If layers differ in their window, which attention plans do not support
            (docs/decisions/0014-what-a-model-folder-may-say.md), or keys contradict each other.
    """
    window = _read_window(fields, family)
    slides = _read_sliding_layers(fields, family, num_layers, window)
    if not any(slides):
        return None
    given = "layer_types" if fields.has("layer_types") else "sliding_window"
    if window is None:
        allowed = "full_attention only, as sliding_window is off"
        raise fields.unsupported(given, fields.value(given), allowed)
    if window >= max_context_tokens:  # hides nothing
        return None
    if family == "llama":
        # transformers gives its mask no window, but lets its cache forget older tokens.
        allowed = "absent or full_attention: a Llama has no window"
        raise fields.unsupported(given, fields.value(given), allowed)
    if not all(slides) and given == "layer_types":
        allowed = "the same for all layers"
        raise fields.unsupported(given, fields.value(given), allowed)
    if not all(slides):
        allowed = f"0, or at least num_hidden_layers ({num_layers}): all layers share one window"
        raise fields.unsupported("max_window_layers", fields.value("max_window_layers"), allowed)
    return window


def _read_window(fields: ConfigFields, family: str) -> int | None:
    is_off = family in QWEN and not fields.boolean("use_sliding_window", False)
    is_absent = family == "llama" and not fields.has("sliding_window")
    if is_off or is_absent or fields.is_null("sliding_window"):
        return None
    return fields.integer("sliding_window", DEFAULT_WINDOW)


def _read_sliding_layers(
    fields: ConfigFields, family: str, num_layers: int, window: int | None
) -> list[bool]:
    """Return for each layer whether it has the window."""
    layer_types = fields.strings("layer_types")
    if not layer_types:
        num_full = 0
        if family in QWEN:
            default = DEFAULT_MAX_WINDOW_LAYERS
            num_full = fields.integer("max_window_layers", default, at_least=0)
        return [window is not None and layer >= num_full for layer in range(num_layers)]
    if len(layer_types) != num_layers or not LAYER_TYPES.issuperset(layer_types):
        allowed = f"{num_layers} times one of {', '.join(sorted(LAYER_TYPES))}"
        raise fields.unsupported("layer_types", layer_types, allowed)
    return [layer_type == "sliding_attention" for layer_type in layer_types]
