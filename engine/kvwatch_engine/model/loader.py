"""From the name of a model to something that computes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch
from transformers import PreTrainedConfig

from kvwatch.errors import KVWatchError
from kvwatch_engine.contracts.cache import QUANTISED_DTYPES, KVCacheSpec, KVDtype
from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.model import ModelImplementation, ModelInfo, TextSource
from kvwatch_engine.model.adapters import AdapterStore
from kvwatch_engine.model.causal_model import CausalModel
from kvwatch_engine.model.config_file import read_config
from kvwatch_engine.model.decoder_config import UnsupportedByDecoder, is_known, longest_context
from kvwatch_engine.model.dtypes import choose_dtype
from kvwatch_engine.model.fingerprint import weights_fingerprint
from kvwatch_engine.model.generation import eos_token_ids, read_generation_config, sampling_defaults
from kvwatch_engine.model.image_encoder import ImageEncoder
from kvwatch_engine.model.kv_groups import kv_groups
from kvwatch_engine.model.lean import load_lean
from kvwatch_engine.model.llava import takes_images
from kvwatch_engine.model.parts import ModelParts
from kvwatch_engine.model.sources import resolve_source
from kvwatch_engine.model.transformers_backend.load import load_transformers
from kvwatch_engine.model.weights import weight_files

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory."""

    info: ModelInfo
    decoder: CausalModel
    adapters: AdapterStore
    """LoRA adapters beside it."""
    images: ImageEncoder | None = None
    """What sees images; none if the model takes none."""

    @property
    def device(self) -> torch.device:
        """Where its weights lie and its KV cache has to."""
        return self.decoder.device

    def cache_spec(self, block_size: int, kv_dtype: KVDtype = "auto") -> KVCacheSpec:
        """Return the shape of a KV cache for this model.

        Args:
            block_size: tokens of a block.
            kv_dtype: `auto` keeps keys and values in the dtype that the model computes in.
        """
        info = self.info
        return KVCacheSpec(
            num_layers=max(len(group.layers) for group in info.groups),
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            block_size=block_size,
            dtype=info.dtype if kv_dtype == "auto" else QUANTISED_DTYPES[kv_dtype],
        )


def load_model(  # noqa: PLR0913 - by keyword
    source: str,
    *,
    dtype: str = "auto",
    served_name: str | None = None,
    cache_dir: Path | None = None,
    device: torch.device | None = None,
    implementation: ModelImplementation = "auto",
    texts: TextSource | None = None,
) -> LoadedModel:
    """Load a model.

    A GGUF file (and the embedded model is one) is converted at its first use, which takes some 20 s; after that a
    start reads plain safetensors.

    Args:
        source: `embedded`, a Hugging Face folder, a .gguf file, or a name on the hub (`owner/model`).
        dtype: `auto`, `float32` or `bfloat16`, see `choose_dtype`.
        served_name: name under which the model is served; none takes it from the source.
        cache_dir: where converted models are kept; none means `sources.default_cache_dir()`.
        device: to compute on, see `choose_device`; none means the CPU.
        implementation: what computes its layers; `auto` takes the lean decoder where it knows the model.
        texts: tokenizer and chat template, if not the model's own.

    Raises:
        ModelError: the model does not exist, is damaged, or of a kind that is not supported.
    """
    try:
        found = resolve_source(source, cache_dir)
        loaded = _load(found.folder, dtype, device or torch.device("cpu"), implementation, texts or TextSource())
        return replace(loaded, info=replace(loaded.info, name=served_name or found.name))
    except KVWatchError:
        raise
    except Exception as error:  # damaged files make readers raise every kind; to a user all mean the same
        raise ModelError(
            f"model {source!r} cannot be loaded ({type(error).__name__}: {error}); are its files complete?"
        ) from error


def _load(
    folder: Path, dtype: str, device: torch.device, implementation: ModelImplementation, texts: TextSource
) -> LoadedModel:
    choice = choose_dtype(dtype, device)
    config = read_config(folder)
    generation = read_generation_config(folder)
    files = weight_files(folder)
    # Hashing frees the interpreter, so it runs beside the loading, which mostly waits for memory.
    with ThreadPoolExecutor(1, thread_name_prefix="fingerprint") as executor:
        fingerprint = executor.submit(weights_fingerprint, files)
        parts = _load_parts(folder, files, config, choice.dtype, device, implementation)
    network, shape, images = parts.network, parts.shape, parts.images
    info = ModelInfo(
        name=folder.name,
        folder=folder,
        texts=texts,
        architecture=parts.architecture,
        implementation=parts.implementation,
        num_layers=len(shape.sliding_windows),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=parts.text.hidden_size,
        vocab_size=parts.text.vocab_size,
        max_position=longest_context(parts.text),
        eos_token_ids=eos_token_ids(texts.tokenizer or folder, generation, parts.text),
        sampling_defaults=sampling_defaults(generation),
        dtype=choice.name,
        dtype_reason=choice.reason,
        groups=kv_groups(shape.sliding_windows),
        weights_fingerprint=fingerprint.result(),
        weights_bytes=parts.weights_bytes,
        images=images.input if images is not None else None,
    )
    return LoadedModel(info, network, parts.adapters, images)


def _load_parts(
    folder: Path,
    files: tuple[Path, ...],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    implementation: ModelImplementation,
) -> ModelParts:
    """Load by the implementation that was asked for, or by the lean decoder where it computes such a model.

    Raises:
        ModelError: it cannot be loaded, or not by that implementation.
    """
    if implementation == "transformers" or (implementation == "auto" and not is_known(config)):
        return load_transformers(folder, config, dtype, device)
    try:
        return load_lean(files, config, dtype, device)
    except UnsupportedByDecoder as error:
        if implementation == "lean" or takes_images(config):
            raise
        logger.info("served by transformers' own layers", reason=str(error))
    return load_transformers(folder, config, dtype, device)
