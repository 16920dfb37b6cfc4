"""Every key that config.json may have: used, without effect, or refused by name.

transformers keeps keys that a family does not define as attributes, and some of its code reads
them: `is_causal`, `attention_chunk_size` and `sliding_window` change the tokens of a Llama. A key
that no table lists is therefore refused, because it may change the model.
"""

from collections.abc import Mapping

from llm_engine.config_fields import ConfigFields
from llm_engine.generation_config import SETTINGS

# Keys that model_config.py, rope_config.py and window_config.py read
USED = frozenset(
    {
        "architectures",
        "attention_bias",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "torch_dtype",
        "use_sliding_window",
        "vocab_size",
    }
)
# Key |-> the only value, besides null, that is implemented here
FIXED: Mapping[str, object] = {
    "activation": "swiglu",
    "add_cross_attention": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "is_llama_config": True,
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
    "use_qk_norm": False,
}
# Key |-> why it must be absent or null
REFUSED: Mapping[str, str] = {
    "attention_chunk_size": "attention within chunks is not implemented",
    "configuration_files": "only config.json is read",
    "kv_sharing_modes": "each layer has keys and values of its own",
    "per_layer_config": "all layers have one shape",
    "quantization_config": "no quantized weights",
    "text_config": "only the keys of config.json itself are read",
    "transformers_weights": "weights are in model.safetensors or the shards of its index",
}
# Why keys have no effect |-> the keys
HARMLESS: Mapping[str, tuple[str, ...]] = {
    "a note about the file": (
        "_name_or_path",
        "model_name",
        "name_or_path",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
    ),
    "only training reads it": (
        "attention_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "gradient_checkpointing",
        "hidden_dropout",
        "initializer_range",
        "pretraining_tp",
        "resid_pdrop",
    ),
    "it changes how tokens are computed, not which": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "_flash_attn_2_enabled",
        "attn_implementation",
        "chunk_size_feed_forward",
        "experts_implementation",
        "torchscript",
        "use_bfloat16",
    ),
    "it asks for outputs that no request returns": (
        "keys_to_ignore_at_inference",
        "return_dict",
        "tie_last_hidden_states",
    ),
    "only classifiers read it": (
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
    ),
    "only encoder-decoder models read it": (
        "cross_attention_hidden_size",
        "is_decoder",
        "tie_encoder_decoder",
    ),
    "it concerns texts; the engine sees token ids": (
        "cls_token_id",
        "mask_token_id",
        "max_sequence_length",
        "model_max_length",
        "prefix",
        "sep_token_id",
        "tokenizer_class",
        "tokenizer_model_max_length",
        "unk_token_id",
    ),
}
KNOWN = (
    USED
    | FIXED.keys()
    | REFUSED.keys()
    | {"auto_map"}
    | {name for names in HARMLESS.values() for name in names}
    | SETTINGS  # which are read here if there is no generation_config.json
)


def check_keys(fields: ConfigFields) -> None:
    """Refuse unknown keys, and keys that require something that is not implemented.

    Raises:
        UnsupportedModel: Names the key, what was found and what is allowed.
    """
    for name in fields.names():
        # transformers treats a null is_causal as false.
        if fields.is_null(name) and name != "is_causal":
            continue
        if name not in KNOWN:
            raise fields.unknown(name)
        if name in FIXED and fields.value(name) != FIXED[name]:
            raise fields.unsupported(name, fields.value(name), f"absent or {FIXED[name]!r}")
        if name in REFUSED:
            raise fields.unsupported(name, fields.value(name), f"absent: {REFUSED[name]}")
    # transformers runs a folder's code only if told to trust it; the code may compute another
    # model.
    for name in ("AutoConfig", "AutoModelForCausalLM"):
        if fields.nested("auto_map").has(name):
            raise fields.unsupported(
                "auto_map", fields.value("auto_map"), f"without {name}: code of a folder is not run"
            )
