"""What the rest of the engine knows of a loaded model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvwatch_engine.contracts.cache import KVGroup
from kvwatch_engine.contracts.image import ImageInput

LoadedImplementation = Literal["lean", "transformers"]
"""What computes a model's layers: this package's own decoder, or transformers' modules over the paged cache."""

ModelImplementation = Literal["auto", LoadedImplementation]
"""What may be asked for; `auto` is the lean decoder where it knows the model."""


@dataclass(frozen=True, slots=True)
class TextSource:
    """Where the tokenizer and the chat template come from, if not from the model's folder."""

    tokenizer: Path | None = None
    """Folder of the tokenizer."""
    chat_template: str | None = None
    """The template itself, in Jinja."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling parameters that the model's generation_config recommends; none where it is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded model that need no tensors."""

    name: str
    """Name under which it is served."""
    further_names: tuple[str, ...] = ()
    """Names under which it is served as well."""
    folder: Path
    """Hugging Face folder with its configuration, tokenizer and chat template."""
    texts: TextSource = TextSource()
    """What was given instead of its own tokenizer and template."""
    architecture: str
    implementation: LoadedImplementation = "lean"
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int
    """Longest context in tokens that the model was made for."""
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    dtype: str
    """Name of the torch dtype that it computes in: `float32` or `bfloat16`."""
    dtype_reason: str
    """Why this dtype, for the start message."""
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    """How its layers are divided into KV groups."""
    weights_fingerprint: str
    """Changes whenever the weights do."""
    weights_bytes: int
    images: ImageInput | None = None
    """How it takes images; none if it takes none."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which it is served, the one in answers and metrics first."""
        return (self.name, *self.further_names)

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of its tokenizer."""
        return self.texts.tokenizer or self.folder
