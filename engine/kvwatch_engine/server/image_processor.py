"""The model's own image processor: transformers', in the form that needs pillow only."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.image import ImageInput, PreparedImage


class ImageProcessor:
    """Cuts, scales and normalises images as the model was trained on. Every method may be called from any thread."""

    def __init__(self, processor: Any) -> None:
        """Wrap a processor of transformers."""
        self._processor = processor

    @classmethod
    def load(cls, folder: Path, wanted: ImageInput) -> "ImageProcessor":
        """Load the image processor of a model folder.

        Raises:
            ModelError: the folder has none, or one that makes something else than the model takes.
        """
        from transformers import AutoImageProcessor  # heavy, and of use to models that take images only

        try:
            found = cls(AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True))
            shape = found.prepare(Image.new("RGB", (64, 48))).pixels.shape
        except Exception as error:  # damaged files make its readers raise every kind
            raise ModelError(f"the model's image processor cannot be loaded: {error}") from error
        if shape != wanted.pixel_shape:
            raise ModelError(
                f"the model's image processor makes images of {shape}, but its vision tower takes {wanted.pixel_shape} "
                "(channels, height, width); correct preprocessor_config.json or config.json"
            )
        return found

    def prepare(self, image: Image.Image) -> PreparedImage:
        """Return what the model sees of an RGB image."""
        [found] = self._processor(images=[image], return_tensors="np")["pixel_values"]
        pixels = np.ascontiguousarray(found, dtype=np.float32)
        pixels.setflags(write=False)
        content = hashlib.sha256(b"kvwatch.image.v1" + repr(pixels.shape).encode() + pixels.tobytes())
        return PreparedImage(content.digest(), pixels)
