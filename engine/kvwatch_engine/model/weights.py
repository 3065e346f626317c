"""Reads safetensors files straight into fused weights."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.decoder import DecoderWeights, LayerWeights
from kvwatch_engine.model.decoder_config import DecoderConfig
from kvwatch_engine.model.linear import Linear, stored_dtype

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Old checkpoints carry tables that are computed from the configuration.
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"

Rename = Callable[[str], str | None]
"""Gives a stored tensor the name that its reader knows; None for what it leaves alone."""


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model folder, sharded or not.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not a valid index of weight files: {error!r}") from error
        files = tuple(folder / Path(name).name for name in names)
    else:
        files = (folder / _SINGLE,)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing)}; only safetensors weights (or a GGUF file) can be loaded"
        )
    return files


class TensorFiles:
    """Tensors of several safetensors files by name. A context manager; remembers which tensors were taken."""

    def __init__(self, files: Sequence[Path], device: torch.device, rename: Rename | None = None) -> None:
        self._files = files
        self._rename = rename or str
        self._device = device
        self._stack = ExitStack()
        self._handles: dict[str, tuple[Any, str]] = {}

    def __enter__(self) -> Self:
        """Open all files.

        Raises:
            ModelError: a file is damaged.
        """
        for file in self._files:
            try:
                handle = self._stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"{file.name} is not a readable safetensors file: {error}") from error
            for stored in handle.keys():  # noqa: SIM118 (no mapping)
                name = self._rename(stored)
                if name is not None:
                    self._handles[name] = handle, stored
        return self

    def __exit__(self, *_: object) -> None:
        """Close all files."""
        self._stack.close()

    @property
    def remaining(self) -> list[str]:
        """Names of tensors that nobody took."""
        return sorted(self._handles)

    def discard(self, name: str) -> None:
        """Count a tensor as taken, whether it is there or not."""
        self._handles.pop(name, None)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in the file's dtype, on the device; each can be taken once.

        Raises:
            ModelError: it is missing, or not of this shape.
        """
        found = self._handles.pop(name, None)
        if found is None:
            raise ModelError(f"the weights lack {name}; configuration and weights do not belong together")
        handle, stored = found
        tensor: torch.Tensor = handle.get_tensor(stored)
        if tensor.shape != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, but the configuration asks for {shape}")
        return tensor.to(self._device)


def load_weights(
    files: Sequence[Path],
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device | None = None,
    rename: Rename | None = None,
) -> DecoderWeights:
    """Load a decoder's weights.

    Args:
        files: see `weight_files`.
        config: shape of the decoder.
        dtype: float32 or bfloat16, to compute in.
        device: to compute on; none means the CPU.
        rename: names of stored tensors in a decoder of its own; none if that is what they have.

    Raises:
        ModelError: tensors are missing, of the wrong shape, or left over (they would change the result).
    """
    with TensorFiles(files, device or torch.device("cpu"), rename) as tensors:
        weights = _Builder(tensors, config, dtype).decoder()
        left = [name for name in tensors.remaining if not name.endswith(_COMPUTED_SUFFIX)]
    if left:
        raise ModelError(f"{len(left)} weights are not part of {config.architecture}: {', '.join(left[:5])}")
    return weights


class _Builder:
    """Assembles fused weights from a checkpoint's tensors."""

    def __init__(self, tensors: TensorFiles, config: DecoderConfig, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._config = config
        self._dtype = dtype
        self._num_bytes = 0

    def decoder(self) -> DecoderWeights:
        config = self._config
        table_shape = (config.vocab_size, config.hidden_size)
        table = self._tensors.take("model.embed_tokens.weight", table_shape)
        embedding = self._kept(table, stored_dtype(table, self._dtype))
        if config.has_tied_embeddings:
            self._tensors.discard("lm_head.weight")
            # The product reads another layout than the lookup does, so a packed copy is kept beside the table.
            logits = Linear(embedding, dtype=self._dtype)
        else:
            logits = Linear(self._tensors.take("lm_head.weight", table_shape), dtype=self._dtype)
        self._num_bytes += logits.num_bytes
        layers = tuple(self._layer(f"model.layers.{index}.") for index in range(config.num_layers))
        norm = self._norm("model.norm.weight", config.hidden_size)
        return DecoderWeights(embedding=embedding, layers=layers, norm=norm, logits=logits, num_bytes=self._num_bytes)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [(attention + "q_proj", query_size), (attention + "k_proj", kv_size), (attention + "v_proj", kv_size)]
        gate_up = [(mlp + "gate_proj", config.intermediate_size), (mlp + "up_proj", config.intermediate_size)]
        output, down = [(attention + "o_proj", config.hidden_size)], [(mlp + "down_proj", config.hidden_size)]
        before_mlp = f"{'pre_feedforward' if config.has_output_norms else 'post_attention'}_layernorm.weight"
        return LayerWeights(
            attention_norm=self._norm(prefix + "input_layernorm.weight", config.hidden_size),
            qkv=self._fused(qkv, config.hidden_size, config.has_qkv_bias),
            qk_norm=self._qk_norm(attention) if config.has_qk_norm else None,
            output=self._fused(output, query_size, config.has_output_bias),
            mlp_norm=self._norm(prefix + before_mlp, config.hidden_size),
            attention_output_norm=self._output_norm(prefix + "post_attention_layernorm.weight"),
            mlp_output_norm=self._output_norm(prefix + "post_feedforward_layernorm.weight"),
            gate_up=self._fused(gate_up, config.hidden_size, config.has_mlp_bias),
            down=self._fused(down, config.intermediate_size, config.has_mlp_bias),
        )

    def _fused(self, parts: list[tuple[str, int]], in_features: int, has_bias: bool) -> Linear:  # noqa: FBT001 (private)
        """Return one layer that computes the outputs of several, one after the other."""
        take = self._tensors.take
        # Parts of several dtypes, if there are any, become the one that holds all of them.
        weight = torch.cat([take(f"{name}.weight", (size, in_features)) for name, size in parts])
        bias = torch.cat([take(f"{name}.bias", (size,)) for name, size in parts]) if has_bias else None
        layer = Linear(weight, bias, dtype=self._dtype)
        self._num_bytes += layer.num_bytes
        return layer

    def _qk_norm(self, attention: str) -> torch.Tensor:
        config = self._config
        query, key = (self._norm(f"{attention}{name}_norm.weight", config.head_dim) for name in "qk")
        return torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])

    def _output_norm(self, name: str) -> torch.Tensor | None:
        return self._norm(name, self._config.hidden_size) if self._config.has_output_norms else None

    def _norm(self, name: str, size: int) -> torch.Tensor:
        """Return a norm's weight; an offset is added before it is rounded to the dtype that is computed in."""
        weight = self._tensors.take(name, (size,))
        offset = self._config.norm_offset
        return self._kept(weight.float() + offset if offset else weight, self._dtype)

    def _kept(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy, which does not change with the file that the tensor is mapped from, and count it."""
        self._num_bytes += tensor.numel() * dtype.itemsize
        return tensor.to(dtype, copy=True)
