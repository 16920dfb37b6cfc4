"""The tensors of a GGUF file under the names of a Hugging Face checkpoint. Reads no weights."""

import re
from dataclasses import dataclass

from llm_engine.checkpoint import TensorEntry, Tensors, expected_shapes
from llm_engine.errors import CheckpointMismatch, CheckpointMissing
from llm_engine.gguf_config import ROPE_FACTORS
from llm_engine.gguf_file import GGUFHeader
from llm_engine.model_config import ModelConfig

# Module in a Hugging Face checkpoint |-> name in GGUF
_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Read with the configuration, or computed from it.
_WITHOUT_A_PLACE = re.compile(rf"{re.escape(ROPE_FACTORS)}|blk\.\d+\.attn_rot_embd\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensorEntry(TensorEntry):
    """One tensor in a GGUF file's header; `dtype` is a key of gguf_file.BLOCKS."""

    # Heads in which the rows of the two rotated halves alternate; 0: none. llama.cpp's conversion
    # reorders them so, because it rotates neighbours while the models rotate halves.
    num_interleaved_heads: int


def read_gguf_tensors(header: GGUFHeader, config: ModelConfig) -> Tensors:
    """Return all tensors of the model, with the shapes that it requires.

    Raises:
        CheckpointMissing: If a tensor is missing.
        CheckpointMismatch: If a shape or the set of tensors contradicts the metadata.
    """
    tensors: dict[str, TensorEntry] = {}
    places = {}
    for name, shape in expected_shapes(config).items():
        gguf_name = _gguf_name(name)
        places[gguf_name] = name
        tensor = header.tensors.get(gguf_name)
        if tensor is None:
            raise CheckpointMissing(f"{header.path}: tensor {gguf_name} {list(shape)} is not there")
        if tensor.shape != shape:
            raise CheckpointMismatch(
                f"{header.path}: tensor {gguf_name} has shape {list(tensor.shape)}, "
                f"the metadata requires {list(shape)}"
            )
        tensors[name] = GGUFTensorEntry(
            path=header.path,
            dtype=tensor.type,
            shape=shape,
            begin=tensor.begin,
            end=tensor.end,
            num_interleaved_heads=_num_interleaved_heads(name, config),
        )
    for gguf_name in sorted(header.tensors.keys() - places.keys()):
        if not _WITHOUT_A_PLACE.fullmatch(gguf_name):
            raise CheckpointMismatch(
                f"{header.path}: tensor {gguf_name} has no place in a {config.family} model with "
                "this metadata"
            )
    return tensors


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer is None:
        return f"{_MODULES[module]}.{kind}"
    return f"blk.{layer[1]}.{_MODULES[layer[2]]}.{kind}"


def _num_interleaved_heads(name: str, config: ModelConfig) -> int:
    if config.family in ("llama", "mistral"):
        if ".q_proj." in name:
            return config.num_qo_heads
        if ".k_proj." in name:
            return config.num_kv_heads
    return 0
