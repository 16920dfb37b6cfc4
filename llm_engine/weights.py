"""Weights of a decoder on their device, filled tensor by tensor from a checkpoint's files.

Projections that read the same input are stored as one matrix, so that a layer has four matrix
products. Each tensor of a file is cast and copied to its rows of that matrix, and dequantized if it
comes from a GGUF file; no second copy of the model ever exists.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attn_kernels.linear.plan import GATE_GROUP
from llm_engine.checkpoint import Tensors
from llm_engine.errors import CheckpointCorrupt
from llm_engine.gguf_checkpoint import GGUFTensorEntry
from llm_engine.gguf_quants import PLAIN_DTYPES
from llm_engine.gguf_weights import fill_from_gguf
from llm_engine.model_config import ModelConfig
from llm_engine.pinned_reader import reading_pinned

READER_DEVICES = ("cuda",)  # others get the weights out of mapped files, without a further copy


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearWeights:
    """y = x @ weight.T + bias."""

    weight: Tensor  # [num_out, num_in]
    bias: Tensor | None  # [num_out]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: LinearWeights  # rows: all query heads, then key heads, then value heads
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: LinearWeights
    mlp_norm: Tensor  # [hidden]
    gate_up: LinearWeights  # rows: GATE_GROUP of gate, then of up, in turns
    down: LinearWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWeights:
    """A whole model; all tensors on one device with one dtype."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; the embedding itself where the two are tied


def load_weights(
    config: ModelConfig,
    tensors: Tensors,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_loaded: Callable[[int], None],
) -> DecoderWeights:
    """Read all tensors and return them on the device, newly allocated.

    Args:
        config: The configuration of the model.
        tensors: The tensors of its checkpoint.
        device: The device of the result.
        dtype: The dtype of the result.
        on_loaded: Called after each tensor with its bytes in the file.

    Raises:
        CheckpointCorrupt: If a file with a valid header cannot be read.
    """
    with ExitStack() as stack:
        loader = _Loader(tensors, stack, device, dtype, on_loaded)
        embedding = loader.join("model.embed_tokens.weight")
        layers = tuple(_load_layer(loader, config, layer) for layer in range(config.num_layers))
        final_norm = loader.join("model.norm.weight")
        lm_head = loader.join("lm_head.weight") if "lm_head.weight" in tensors else embedding
        loader.finish()
    return DecoderWeights(
        embedding=embedding, layers=layers, final_norm=final_norm, lm_head=lm_head
    )


def _load_layer(loader: "_Loader", config: ModelConfig, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LayerWeights(
        input_norm=loader.join(f"{prefix}.input_layernorm.weight"),
        qkv=loader.linear(*(f"{attention}.{part}_proj" for part in "qkv")),
        q_norm=loader.join(f"{attention}.q_norm.weight") if config.has_qk_norm else None,
        k_norm=loader.join(f"{attention}.k_norm.weight") if config.has_qk_norm else None,
        output=loader.linear(f"{attention}.o_proj"),
        mlp_norm=loader.join(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=loader.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", rows_in_turn=GATE_GROUP),
        down=loader.linear(f"{mlp}.down_proj"),
    )


class _Loader:
    def __init__(
        self,
        tensors: Tensors,
        stack: ExitStack,
        device: torch.device,
        dtype: torch.dtype,
        on_loaded: Callable[[int], None],
    ) -> None:
        self._tensors = tensors
        self._stack = stack
        self._device = device
        self._dtype = dtype
        self._on_loaded = on_loaded
        self._files: dict[Path, Any] = {}  # path |-> open safetensors file
        uses_reader = device.type in READER_DEVICES
        self._reader = stack.enter_context(reading_pinned(device)) if uses_reader else None
        self._pieces: list[tuple[str, list[Future[None]]]] = []  # tensor, what is being read of it

    def linear(self, *names: str, rows_in_turn: int | None = None) -> LinearWeights:
        weight, bias = (
            self.join(*(f"{name}.{part}" for name in names), rows_in_turn=rows_in_turn)
            if f"{names[0]}.{part}" in self._tensors
            else None
            for part in ("weight", "bias")
        )
        assert weight is not None
        return LinearWeights(weight=weight, bias=bias)

    def join(self, *names: str, rows_in_turn: int | None = None) -> Tensor:
        """Return tensors stacked into one, each whole or so many rows of each in turn."""
        shapes = [self._tensors[name].shape for name in names]
        num_rows = sum(shape[0] for shape in shapes)
        joined = torch.empty((num_rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        if rows_in_turn is None:
            parts = torch.split(joined, [shape[0] for shape in shapes])
        else:
            turns = joined.view(-1, len(names), rows_in_turn, *joined.shape[1:])
            parts = turns.unbind(1)
        for name, part in zip(names, parts, strict=True):
            self._fill(part, name)
        return joined

    def finish(self) -> None:
        """Wait for what is still being read."""
        for name, pieces in self._pieces:
            with self._told(name):
                for each in pieces:
                    each.result()
            self._count(name)

    def _fill(self, rows: Tensor, name: str) -> None:
        entry = self._tensors[name]
        with self._told(name):
            if isinstance(entry, GGUFTensorEntry):
                fill_from_gguf(rows, entry)
            elif self._reader is not None and PLAIN_DTYPES[entry.dtype] == rows.dtype:
                pieces = self._reader.fill(rows, entry.path, entry.begin)
                self._pieces.append((name, pieces))
                return
            else:
                rows.copy_(self._file(entry.path).get_tensor(name).view(rows.shape))
        self._count(name)

    def _count(self, name: str) -> None:
        entry = self._tensors[name]
        self._on_loaded(entry.end - entry.begin)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Tell which tensor cannot be read."""
        try:
            yield
        except (OSError, EOFError, SafetensorError) as error:
            path = self._tensors[name].path
            raise CheckpointCorrupt(f"{path}: tensor {name} cannot be read: {error}") from error

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[path]
