"""Reads what was set about images in prompts: part of the composition root of `kvwatch serve`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvwatch.config import parse_bytes
from kvwatch_engine.serve.settings import ServeSettings

if TYPE_CHECKING:
    from kvwatch_engine.model.loader import LoadedModel
    from kvwatch_engine.server import ServerSettings


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """What was set about images, as numbers."""

    max_images: int
    max_bytes: int
    max_pixels: int
    cache_bytes: int

    def limit(self, settings: "ServerSettings") -> "ServerSettings":
        """Return the server's settings with these limits."""
        return replace(
            settings,
            max_images=self.max_images,
            max_image_bytes=self.max_bytes,
            max_image_pixels=self.max_pixels,
        )

    def bound_cache(self, model: "LoadedModel") -> None:
        """Bound what a model keeps of the images that it has encoded, if it takes any."""
        if model.images is not None:
            model.images.max_cache_bytes = self.cache_bytes


def image_settings(settings: ServeSettings) -> ImageSettings:
    """Read the settings, before a model is loaded for them.

    Raises:
        ConfigError: a size is none.
    """
    return ImageSettings(
        max_images=settings.max_images,
        max_bytes=parse_bytes(settings.max_image_bytes, "--max-image-bytes"),
        max_pixels=settings.max_image_pixels,
        cache_bytes=parse_bytes(settings.image_cache, "--image-cache"),
    )
