"""Images in prompts: what a model takes, what a request brings, what a step needs of them. Knows no file formats."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PixelArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """How a model takes images: each stands in the prompt as a run of placeholder tokens of fixed length."""

    placeholder_id: int
    """Token id of a placeholder. It is never generated."""
    num_tokens: int
    """Placeholders of one image."""
    pixel_shape: tuple[int, int, int]
    """Channels, height and width of a prepared image."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the model sees it: cut, scaled and normalised. Equal if the content is."""

    content_hash: bytes
    """Names the pixels below."""
    pixels: PixelArray = field(compare=False, repr=False)
    """f32[channels, height, width], never written."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in the place of placeholder tokens of a prompt."""

    position: int
    """First of its tokens in the prompt."""
    num_tokens: int
    image: PreparedImage

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.position + self.num_tokens


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Consecutive tokens of a step that stand for a part of an image, or for all of it."""

    start: int
    """First of them in the step's packed arrays."""
    end: int
    offset: int
    """Which of the image's tokens the first one is."""
    image: PreparedImage
