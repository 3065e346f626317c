"""The LoRA adapters in memory, by load id. Knows neither who may use them nor under which names they are served."""

import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from kvwatch_engine.contracts.adapter import DEFAULT_MAX_RANK, Adapter, AdapterSpan, LoadId
from kvwatch_engine.contracts.errors import AdapterError, is_out_of_memory
from kvwatch_engine.model.decoder_config import SUPPORTED_ARCHITECTURES, DecoderConfig
from kvwatch_engine.model.lora import LoraStep, LoraWeights
from kvwatch_engine.model.lora_files import LoraTarget, read_adapter


class AdapterStore:
    """Adapters of one model; implements `AdapterMemory`.

    Loading and discarding may happen on any thread, while steps run: what is loaded is immutable, and is entered by a
    single assignment once it is complete.
    """

    def __init__(
        self,
        config: DecoderConfig | None,
        dtype: torch.dtype,
        device: torch.device,
        decoder_name: Callable[[str], str | None] = str,
        max_rank: int = DEFAULT_MAX_RANK,
    ) -> None:
        """Create the store of a model.

        Args:
            config: the model's shape; none if its layers are transformers' own, to which no adapter can be added.
            dtype: what it computes in; adapters are converted to it.
            device: where it computes.
            decoder_name: gives the name in the decoder of what a model with further parts calls a module.
            max_rank: the highest rank that an adapter may have.
        """
        self._config = config
        self._dtype = dtype
        self._device = device
        self._decoder_name = decoder_name
        self.max_rank = max_rank
        self._weights: dict[LoadId, LoraWeights] = {}

    def load(self, name: str, folder: Path) -> Adapter:
        """Read an adapter's files; steps may use it from the return on.

        Raises:
            AdapterError: something is wrong with it; nothing was changed.
        """
        if self._config is None:
            raise AdapterError(
                f"adapter {name!r} cannot be loaded: this model's layers are transformers' own, and adapters are "
                f"supported for {', '.join(SUPPORTED_ARCHITECTURES.values())} only"
            )
        target = LoraTarget(self._config, self._dtype, self._device, self.max_rank, self._decoder_name)
        try:
            with torch.inference_mode():
                weights = read_adapter(folder, target)
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r} cannot be loaded: {error}") from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise AdapterError(f"adapter {name!r} cannot be loaded: there is not enough memory for it") from error
        load_id = LoadId(secrets.token_hex(16))
        self._weights[load_id] = weights
        return Adapter(
            name=name,
            load_id=load_id,
            rank=weights.rank,
            num_bytes=weights.num_bytes,
            fingerprint=weights.fingerprint,
        )

    def discard(self, load_id: LoadId) -> None:
        """Free an adapter's weights; no step may use it any more. Unknown ids are ignored."""
        self._weights.pop(load_id, None)

    @property
    def num_bytes(self) -> int:
        """Memory that all adapters take."""
        return sum(weights.num_bytes for weights in list(self._weights.values()))

    def of_step(self, spans: Iterable[AdapterSpan]) -> LoraStep:
        """Return the adapters of a step. Engine thread only."""
        return LoraStep([(slice(span.start, span.end), self._weights[span.load_id]) for span in spans])
