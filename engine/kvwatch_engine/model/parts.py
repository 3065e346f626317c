"""What an implementation of a model makes of its folder, before it has a name and a cache."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from kvwatch_engine.contracts.model import LoadedImplementation
from kvwatch_engine.model.adapters import AdapterStore
from kvwatch_engine.model.causal_model import CausalModel
from kvwatch_engine.model.image_encoder import ImageEncoder


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention is like in all layers of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_windows: tuple[int | None, ...]
    """Of each layer: tokens that a query sees, itself included; none sees all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """A model in memory."""

    architecture: str
    implementation: LoadedImplementation
    text: PreTrainedConfig
    """Configuration of its decoder."""
    network: CausalModel
    shape: AttentionShape
    adapters: AdapterStore
    weights_bytes: int
    images: ImageEncoder | None = None
    """What sees images; none if the model takes none."""
