"""Images in prompts: how many and how large they may be, and which tokens stand for them. Any thread."""

from collections.abc import Sequence

from PIL import Image

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.image import ImageInput, PromptImage
from kvwatch_engine.contracts.model import ModelInfo
from kvwatch_engine.server.chat_template import ChatMessage
from kvwatch_engine.server.conversation import ImagePart, TextPart, Turn, images_of
from kvwatch_engine.server.image_files import base64_of, decode_image, num_bytes_of
from kvwatch_engine.server.image_processor import ImageProcessor
from kvwatch_engine.server.settings import ServerSettings
from kvwatch_engine.server.tokenizer import Tokenizer


class ImagePrompts:
    """The images of one model's prompts."""

    def __init__(
        self, model_input: ImageInput, processor: ImageProcessor, tokenizer: Tokenizer, settings: ServerSettings
    ) -> None:
        """Create it.

        Args:
            model_input: how the model takes images.
            processor: prepares them.
            tokenizer: names the placeholder, and has the chat template.
            settings: limits.
        """
        self._input = model_input
        self._processor = processor
        self._settings = settings
        self._placeholder = tokenizer.name_of(model_input.placeholder_id)
        self._takes_parts = tokenizer.chat_template.takes_parts(self._placeholder)

    @classmethod
    def of_model(cls, model: ModelInfo, tokenizer: Tokenizer, settings: ServerSettings) -> "ImagePrompts | None":
        """Return what the prompts of a model need, None if it takes no images.

        Raises:
            ModelError: its image processor cannot be loaded.
        """
        if model.images is None:
            return None
        return cls(model.images, ImageProcessor.load(model.folder, model.images), tokenizer, settings)

    def check(self, turns: Sequence[Turn], param: str = "messages") -> int:
        """Check what can be checked without decoding anything; return the bytes of all images.

        Args:
            turns: the conversation.
            param: field of the request that it came from.

        Raises:
            RequestInvalid: too many images, too many bytes, a URL that is not taken, or text that would be taken for
                an image.
        """
        found, limits = images_of(turns), self._settings
        if len(found) > limits.max_images:
            raise RequestInvalid(
                f"there are {len(found)} images, the limit is {limits.max_images}; send fewer, or raise --max-images",
                param=param,
            )
        num_bytes = sum(num_bytes_of(base64_of(image.url, image.param)) for image in found)
        if num_bytes > limits.max_image_bytes:
            raise RequestInvalid(
                f"the images have {num_bytes} bytes, the limit is {limits.max_image_bytes} in all; scale them down, or "
                "raise --max-image-bytes",
                param=param,
            )
        for turn in turns:
            for part in turn.parts:
                if isinstance(part, TextPart):
                    self._refuse_placeholder(part)
        return num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that stand for each image."""
        return self._input.num_tokens

    def message(self, turn: Turn) -> ChatMessage:
        """Return a turn as the model's chat template takes it."""
        if not self._takes_parts:
            return turn.for_template(turn.as_lines(self._placeholder))
        parts = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in turn.parts
        ]
        return turn.for_template(parts)

    def expand(
        self, token_ids: Sequence[int], num_images: int, param: str = "messages"
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return the tokens of a rendered prompt with a run of placeholders for each image, and where the runs begin.

        Raises:
            RequestInvalid: the template placed more or fewer images than there are.
        """
        placeholder, run = self._input.placeholder_id, self._input.num_tokens
        expanded: list[int] = []
        begins: list[int] = []
        for token_id in token_ids:
            if token_id == placeholder:
                begins.append(len(expanded))
                expanded += [placeholder] * run
            else:
                expanded.append(token_id)
        if len(begins) != num_images:
            raise RequestInvalid(
                f"the model's chat template places {len(begins)} of {num_images} images; put images into messages of "
                "the user, and leave its placeholder out of texts",
                param=param,
            )
        return tuple(expanded), begins

    def prepare(self, parts: Sequence[ImagePart], begins: Sequence[int]) -> tuple[PromptImage, ...]:
        """Decode and prepare images, one after the other; `begins` are their places in the prompt.

        Raises:
            RequestInvalid: one cannot be decoded, or is too large.
        """
        return tuple(
            PromptImage(begin, self._input.num_tokens, self._processor.prepare(self._decode(part)))
            for part, begin in zip(parts, begins, strict=True)
        )

    def refuse_placeholders(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse a plain prompt with placeholders, behind which there would be no image.

        Raises:
            RequestInvalid: so.
        """
        if self._input.placeholder_id in token_ids:
            raise RequestInvalid(
                f"{param} has token {self._input.placeholder_id} ({self._placeholder}), which stands for an image; "
                "send images as image_url parts to /v1/chat/completions",
                param=param,
            )

    def _decode(self, part: ImagePart) -> Image.Image:
        return decode_image(base64_of(part.url, part.param), self._settings.max_image_pixels, part.param)

    def _refuse_placeholder(self, part: TextPart) -> None:
        if self._placeholder in part.text:
            raise RequestInvalid(
                f"{part.param} has {self._placeholder}, which stands for an image; remove it, and send images as "
                "image_url parts",
                param=part.param,
            )
