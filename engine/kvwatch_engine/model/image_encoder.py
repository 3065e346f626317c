"""The images of a step: encoded when their first token is computed, kept for the chunks and requests that follow.

A prefix cache hit that covers an image needs no encoding at all. Knows neither requests nor where pixels come from.
"""

from collections import OrderedDict
from collections.abc import Iterable

import torch

from kvwatch_engine.contracts.image import ImageInput, ImageSpan, PreparedImage
from kvwatch_engine.model.vision_tower import VisionTower

DEFAULT_CACHE_BYTES = 256 * 2**20


class ImageEncoder:
    """A vision tower and the features of the images that were used last, by content. Engine thread only."""

    def __init__(self, tower: VisionTower, max_cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        """Create an encoder that has seen no image.

        Args:
            tower: computes features.
            max_cache_bytes: most memory of features that are kept; 0 keeps none.
        """
        self._tower = tower
        self.max_cache_bytes = max_cache_bytes
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._cached_bytes = 0
        self._num_encoded = 0

    @property
    def input(self) -> ImageInput:
        """What images it takes."""
        return self._tower.input

    @property
    def num_bytes(self) -> int:
        """Memory that its weights take."""
        return self._tower.num_bytes

    @property
    def cached_bytes(self) -> int:
        """Memory that kept features take."""
        return self._cached_bytes

    @property
    def num_encoded(self) -> int:
        """Images encoded so far."""
        return self._num_encoded

    def of_step(self, spans: Iterable[ImageSpan]) -> "EncodedSpans":
        """Return the images of a step."""
        return EncodedSpans(self, tuple(spans))

    def features(self, image: PreparedImage) -> torch.Tensor:
        """Return `dtype[num_tokens, hidden_size]`, what the decoder takes in place of an image's placeholders."""
        found = self._features.get(image.content_hash)
        if found is not None:
            self._features.move_to_end(image.content_hash)
            return found
        features = self._tower.encode(torch.tensor(image.pixels))
        self._num_encoded += 1
        self._features[image.content_hash] = features
        self._cached_bytes += features.nbytes
        while self._cached_bytes > self.max_cache_bytes:
            _, oldest = self._features.popitem(last=False)
            self._cached_bytes -= oldest.nbytes
        return features


class EncodedSpans:
    """The images of one step; encodes those that are needed when they are put in their place."""

    def __init__(self, encoder: ImageEncoder, spans: tuple[ImageSpan, ...]) -> None:
        self._encoder = encoder
        self._spans = spans

    def put_into(self, hidden: torch.Tensor) -> None:
        """Overwrite the rows of placeholder tokens in `dtype[num_tokens, hidden_size]`."""
        for span in self._spans:
            features = self._encoder.features(span.image)
            hidden[span.start : span.end] = features[span.offset : span.offset + span.end - span.start]
