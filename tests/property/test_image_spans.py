"""Whatever the scheduler does, exactly the tokens of images are told to stand for them, each for its part of its image.

Every prompt token has an id of its own, so that a packed token says whose it is and where it lies.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from builders import NullModel, make_core, make_request, run_until_idle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch_engine.contracts.image import PreparedImage, PromptImage
from kvwatch_engine.contracts.request import GenerationRequest
from kvwatch_engine.contracts.step import StepInput

NOTHING = np.zeros((1, 1, 1), dtype=np.float32)
FIRST_ID = 1_000
"""Smaller ids are generated ones."""


@dataclass
class Watcher:
    """Compares the spans of each step with what its tokens are."""

    expected: dict[int, tuple[bytes, int]]
    """Token id of a placeholder -> its image, and which of the image's tokens it is."""
    num_seen: int = 0
    wrong: list[tuple[object, object]] = field(default_factory=list)
    """Found and expected, of steps that differ: an engine survives whatever its model raises."""

    def look(self, step: StepInput) -> None:
        found = [
            (place, (span.image.content_hash, span.offset + place - span.start))
            for span in step.images
            for place in range(span.start, span.end)
        ]
        tokens = enumerate(step.token_ids.tolist())
        expected = [(place, self.expected[each]) for place, each in tokens if each in self.expected]
        if sorted(found) != expected or any(span.start >= span.end for span in step.images):
            self.wrong.append((found, expected))
        self.num_seen += len(found)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[GenerationRequest], Watcher]:
    """Return requests of text and images, and what watches their steps."""
    watcher = Watcher({})
    made: list[GenerationRequest] = []
    next_id = FIRST_ID
    for index in range(draw(st.integers(1, 5))):
        images: list[PromptImage] = []
        length = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(0, 3))):
            num_tokens = draw(st.integers(1, 9))
            image = PreparedImage(draw(st.sampled_from([b"cat", b"dog"])), NOTHING)
            images.append(PromptImage(length, num_tokens, image))
            for offset in range(num_tokens):
                watcher.expected[next_id + length + offset] = image.content_hash, offset
            length += num_tokens + draw(st.integers(0, 4))
        prompt = range(next_id, next_id + max(1, length))
        next_id += len(prompt)
        plain = make_request(str(index), prompt, max_tokens=draw(st.integers(1, 12)), n=draw(st.integers(1, 2)))
        made.append(replace(plain, images=tuple(images)))
    return made, watcher


@settings(max_examples=60)
@given(
    load=requests(),
    block_size=st.integers(1, 6),
    chunk=st.sampled_from([None, 1, 2, 3, 7]),
    num_blocks=st.integers(14, 40),
    reserve_prompt=st.booleans(),
)
def test_spans_are_the_images_whatever_is_chunked_shared_preempted_and_computed_again(
    load: tuple[list[GenerationRequest], Watcher],
    block_size: int,
    chunk: int | None,
    num_blocks: int,
    reserve_prompt: bool,
) -> None:
    made, watcher = load
    model = NullModel(vocab_size=50)
    model.on_step = watcher.look
    # Room for the longest of them twice, so that each can run and all together cannot.
    longest = max(len(each.prompt_token_ids) for each in made) + 12
    core = make_core(
        model, block_size=block_size, max_model_len=200, max_prefill_chunk=chunk, eos_token_ids=(), vocab_size=10_000,
        num_blocks=max(num_blocks // block_size, 2 * -(-longest // block_size) + 2), reserve_prompt=reserve_prompt,
    )  # fmt: skip
    for each in made:
        core.add(each, 0)

    run_until_idle(core)

    core.check_integrity()
    assert not watcher.wrong
    assert watcher.num_seen >= len(watcher.expected)
