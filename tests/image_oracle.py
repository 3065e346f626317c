"""transformers as the oracle for prompts with images: its processor prepares them, its `generate` answers.

Computed in fp32; where the reference's two best logits are closer than `NEAR_TIE` a divergence is excused, and the rest
of the answer is checked by teacher forcing.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from builders import make_request
from PIL import Image
from tiny_vision_model import load_processor, picture
from transformers import LlavaForConditionalGeneration

from kvwatch_engine.contracts.image import PreparedImage, PromptImage
from kvwatch_engine.contracts.request import GenerationRequest

NEAR_TIE = 1e-4
NUM_NEW_TOKENS = 12


@dataclass(frozen=True)
class Prompt:
    """A prompt with images, as transformers' processor prepares it."""

    token_ids: tuple[int, ...]
    images: tuple[PromptImage, ...]
    pixel_values: torch.Tensor

    def seen(self) -> dict[str, torch.Tensor]:
        """Return what transformers' model takes beside the tokens."""
        return {"pixel_values": self.pixel_values} if self.images else {}

    def request(self, name: str, **sampling: object) -> GenerationRequest:
        plain = make_request(name, self.token_ids, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **sampling)
        return GenerationRequest(
            request_id=name, prompt_token_ids=self.token_ids, sampling=plain.sampling, images=self.images
        )


class Oracle:
    """transformers' model and processor."""

    def __init__(self, folder: Path) -> None:
        self.processor = load_processor(folder)
        self.model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.placeholder = int(self.model.config.image_token_id)

    def prompt(self, text: str, *pictures: int) -> Prompt:
        """Return a prompt about pictures that are made from numbers."""
        return self.prompt_of(text, *map(picture, pictures))

    def prompt_of(self, text: str, *pictures: Image.Image) -> Prompt:
        """Return a prompt in whose text `<image>` stands for one picture after the other."""
        made = self.processor(text=text, images=list(pictures), return_tensors="pt")
        token_ids = made["input_ids"][0].tolist()
        num_tokens = token_ids.count(self.placeholder) // len(pictures)
        images, position = [], 0
        for pixels in made["pixel_values"]:
            position = token_ids.index(self.placeholder, position)
            prepared = PreparedImage(sha256(pixels.numpy().tobytes()).digest(), pixels.numpy())
            images.append(PromptImage(position, num_tokens, prepared))
            position += num_tokens
        return Prompt(tuple(token_ids), tuple(images), made["pixel_values"])

    def plain(self, text: str) -> Prompt:
        """Return a prompt without images."""
        return Prompt(tuple(self.processor.tokenizer(text).input_ids), (), torch.zeros(0))

    def answer(self, prompt: Prompt) -> list[int]:
        """Return the reference's greedy answer of `NUM_NEW_TOKENS` tokens."""
        ids = torch.tensor([prompt.token_ids])
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=ids, **prompt.seen(), attention_mask=torch.ones_like(ids), do_sample=False,
                min_new_tokens=NUM_NEW_TOKENS, max_new_tokens=NUM_NEW_TOKENS, eos_token_id=None, pad_token_id=0,
                suppress_tokens=[self.placeholder],
            )  # fmt: skip
        return list(output[0, len(prompt.token_ids) :].tolist())

    def check(self, prompt: Prompt, answer: list[int]) -> None:
        """Fail unless an answer is the reference's, or differs from it at near ties only."""
        expected = self.answer(prompt)
        if answer == expected:
            return
        assert len(answer) == len(expected)
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([[*prompt.token_ids, *answer]]), **prompt.seen()).logits[0]
        logits[:, self.placeholder] = -1e30
        logits = logits[len(prompt.token_ids) - 1 : -1]
        for place, token in enumerate(answer):
            loss = float(logits[place].max() - logits[place, token])
            assert loss < NEAR_TIE, f"token {place} is {token}, which is not the reference's choice by {loss}"
