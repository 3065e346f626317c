"""Reads the limits that were set for the API: images in prompts, kept responses. Part of `kvwatch serve`."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvwatch.config import parse_bytes
from kvwatch_engine.serve.settings import ServeSettings

if TYPE_CHECKING:
    from kvwatch_engine.model.loader import LoadedModel
    from kvwatch_engine.server import ServerSettings


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """What was set, as numbers."""

    max_images: int
    max_image_bytes: int
    max_image_pixels: int
    image_cache_bytes: int
    max_stored_responses: int
    max_stored_response_bytes: int

    def limit(self, settings: "ServerSettings") -> "ServerSettings":
        """Return the server's settings with these limits."""
        return replace(
            settings,
            max_images=self.max_images,
            max_image_bytes=self.max_image_bytes,
            max_image_pixels=self.max_image_pixels,
            max_stored_responses=self.max_stored_responses,
            max_stored_response_bytes=self.max_stored_response_bytes,
        )

    def bound_image_cache(self, model: "LoadedModel") -> None:
        """Bound what a model keeps of the images that it has encoded, if it takes any."""
        if model.images is not None:
            model.images.max_cache_bytes = self.image_cache_bytes


def api_limits(settings: ServeSettings) -> ApiLimits:
    """Read the settings, before a model is loaded for them.

    Raises:
        ConfigError: a size is none.
    """
    return ApiLimits(
        max_images=settings.max_images,
        max_image_bytes=parse_bytes(settings.max_image_bytes, "--max-image-bytes"),
        max_image_pixels=settings.max_image_pixels,
        image_cache_bytes=parse_bytes(settings.image_cache, "--image-cache"),
        max_stored_responses=settings.max_stored_responses,
        max_stored_response_bytes=parse_bytes(settings.max_stored_response_bytes, "--max-stored-response-bytes"),
    )
