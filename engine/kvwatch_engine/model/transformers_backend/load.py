"""Loads a model folder as transformers' own modules over the paged cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from kvwatch_engine.contracts.cache import KVCacheSpec
from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.adapters import AdapterStore
from kvwatch_engine.model.kv_groups import kv_groups
from kvwatch_engine.model.parts import ModelParts
from kvwatch_engine.model.transformers_backend import falcon  # noqa: F401 (registers its class)
from kvwatch_engine.model.transformers_backend.network import TransformersNetwork
from kvwatch_engine.model.transformers_backend.proof import prove
from kvwatch_engine.model.transformers_backend.route import IMPLEMENTATION, AttentionRoute
from kvwatch_engine.model.transformers_backend.support import causal_model_class
from kvwatch_engine.model.transformers_backend.trace import trace_attention

_SHOWN: Final = 5
"""Most names of weights in a message."""


def load_transformers(folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> ModelParts:
    """Load a model, and prove that it computes over the paged cache what transformers computes.

    Args:
        folder: with its safetensors files.
        config: of the folder.
        dtype: float32 or bfloat16, to compute in.
        device: to compute on.

    Raises:
        ModelError: it is of a kind that cannot be served, or its files do not belong together.
    """
    found = causal_model_class(config)
    model = _read(found, folder, config, dtype).to(device)
    route = AttentionRoute()
    route.lay(model)
    with torch.inference_mode():
        network = TransformersNetwork(model, route)
        shape = trace_attention(network, config)
        groups = kv_groups(shape.sliding_windows)
        spec = KVCacheSpec(
            num_layers=max(len(group.layers) for group in groups),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=8,
            dtype=str(dtype).removeprefix("torch."),
        )
        prove(network, spec, groups)
    return ModelParts(
        architecture=found.__name__,
        implementation="transformers",
        text=config,
        network=network,
        shape=shape,
        adapters=AdapterStore(None, dtype, device),
        weights_bytes=network.num_bytes,
    )


def _read(found: type[PreTrainedModel], folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Read weights; none may be missing, left over or of another shape.

    Raises:
        ModelError: some are.
    """
    with _without_progress_bars():
        model, report = found.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    for problem, names in (
        ("are missing", report["missing_keys"]),
        (f"are not part of {found.__name__}", report["unexpected_keys"]),
        ("have another shape than the configuration says", report["mismatched_keys"]),
    ):
        if names:
            shown = ", ".join(sorted(str(name) for name in names)[:_SHOWN])
            raise ModelError(
                f"{len(names)} weights {problem}: {shown}; configuration and weights do not belong together"
            )
    quiet: PreTrainedModel = model.eval().requires_grad_(requires_grad=False)
    return quiet


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars out of the server's log."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
