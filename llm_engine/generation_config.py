"""The end tokens of generation_config.json, and a check of all its other settings.

In transformers, a folder can edit logits, forbid tokens or search with beams. Settings that are not
implemented are refused unless they are off: they would change the tokens of every request. Sampling
defaults belong to the router, whose `model_folder.py` reads them.
"""

from collections.abc import Mapping
from pathlib import Path

from llm_engine.config_fields import ConfigFields, read_json

USED = frozenset(
    {
        "eos_token_id",
        # As defaults of requests, by the router:
        "do_sample",
        "min_p",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    }
)
# Setting |-> the values, besides null, that change no token
OFF: Mapping[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "cache_implementation": (  # all but "quantized", which rounds keys and values
        "dynamic",
        "hybrid",
        "offloaded",
        "offloaded_hybrid",
        "offloaded_static",
        "paged",
        "sliding_window",
        "static",
    ),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
# Why settings change no token |-> the settings
HARMLESS: Mapping[str, tuple[str, ...]] = {
    "each request says how long its answers are and how many it wants": (
        "max_length",
        "max_new_tokens",
        "num_return_sequences",
    ),
    "transformers reads them in beam search only, and num_beams is 1": (
        "early_stopping",
        "length_penalty",
    ),
    "ids that only prompts contain": (
        "bos_token_id",
        "pad_token_id",
        "assistant_token_id",
        "user_token_id",
    ),
    "only encoder-decoder models read it": ("decoder_start_token_id",),
    "it leaves softmax and argmax unchanged": ("renormalize_logits",),
    "a request fails on logits that are NaN or infinite": ("remove_invalid_values",),
    "it changes how tokens are computed, not which": (
        "cache_config",
        "compile_config",
        "continuous_batching_config",
        "disable_compile",
        "low_memory",
        "max_cache_len",
        "prefill_chunk_size",
        "use_cache",
    ),
    "it controls drafts; the model accepts only tokens that it would draw itself": (
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "is_assistant",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "prompt_lookup_num_tokens",
        "speculation_type",
        "target_lookbehind",
        "use_mtp",
    ),
    "it asks for outputs that no request returns": (
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "return_dict_in_generate",
    ),
    "a note about the file, or a setting of another program": (
        "_commit_hash",
        "_from_model_config",
        "chat_format",
        "max_window_size",
        "transformers_version",
        "trust_remote_code",
    ),
}
SETTINGS = USED | OFF.keys() | {name for names in HARMLESS.values() for name in names}


def read_eos_token_ids(
    model_dir: Path, config: ConfigFields, *, vocab_size: int
) -> tuple[int, ...]:
    """Return the tokens that end generation; check all other settings.

    Without generation_config.json, settings are read from config.json, as in transformers. If the
    file names no end token, those of config.json count; transformers would never stop.

    Raises:
        CheckpointCorrupt: If generation_config.json is not JSON.
        UnsupportedModel: If a setting would change tokens, or an end token is not in the
            vocabulary.
    """
    own_end = _end_tokens(config, vocab_size)
    path = model_dir / "generation_config.json"
    if not path.exists():
        _check_off(config)
        return own_end
    settings = read_json(path)
    for name in settings.names():
        if name not in SETTINGS and settings.has(name):
            raise settings.unknown(name)
    _check_off(settings)
    return _end_tokens(settings, vocab_size) if settings.has("eos_token_id") else own_end


def _check_off(settings: ConfigFields) -> None:
    for name, values in OFF.items():
        if settings.has(name) and settings.value(name) not in values:
            allowed = " or ".join(["absent", *map(repr, values)])
            raise settings.unsupported(name, settings.value(name), f"{allowed}: not implemented")


def _end_tokens(fields: ConfigFields, vocab_size: int) -> tuple[int, ...]:
    token_ids = fields.integers("eos_token_id")
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise fields.unsupported("eos_token_id", token_ids, f"within 0..{vocab_size - 1}")
    return token_ids
