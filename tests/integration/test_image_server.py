"""Images over HTTP: OpenAI's client in, the text of transformers' `generate` out."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
from image_oracle import NUM_NEW_TOKENS, Oracle
from image_stage import NAME, Part, Stage, content_of, data_url, image, serving, text
from PIL import Image
from tiny_vision_model import IMAGE, NUM_IMAGE_TOKENS, make_tiny_vision_model, picture
from transformers.image_utils import load_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[Stage]:
    with serving(folder) as server:
        yield Stage(server, Oracle(folder))


@pytest.mark.parametrize(
    ("content", "rendered", "pictures"),
    [
        ((image(1), "what is this?"), f"{IMAGE}what is this?", (1,)),
        (("a picture:", image(2)), f"a picture:{IMAGE}", (2,)),
        (("first ", image(1), " then ", image(3), " and after"), f"first {IMAGE} then {IMAGE} and after", (1, 3)),
        ((image(4), image(4), image(5)), f"{IMAGE}{IMAGE}{IMAGE}", (4, 4, 5)),
        (("only words",), "only words", ()),
    ],
)
def test_the_answer_is_the_text_of_transformers_and_counts_the_images_tokens(
    stage: Stage, content: tuple[str | Part, ...], rendered: str, pictures: tuple[int, ...]
) -> None:
    prompt = stage.prompt(rendered, *pictures)

    cold, warm = stage.ask(*content), stage.ask(*content)

    assert content_of(cold) == content_of(warm) == stage.expected(prompt)
    num_tokens = len(prompt.token_ids)
    assert num_tokens > len(pictures) * NUM_IMAGE_TOKENS
    for answer in (cold, warm):
        assert answer.json()["usage"]["prompt_tokens"] == num_tokens
    assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_tokens - 1) // 4 * 4


def test_the_official_client_streams_about_an_image(stage: Stage) -> None:
    with stage.server.openai() as client:
        stream = client.chat.completions.create(
            model=NAME, stream=True, max_tokens=NUM_NEW_TOKENS, temperature=0, extra_body={"ignore_eos": True},
            messages=[{"role": "user", "content": [
                {"type": "text", "text": "look: "},
                {"type": "image_url", "image_url": {"url": data_url(picture(6)), "detail": "high"}},
            ]}],
        )  # fmt: skip
        found = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert found == stage.expected(stage.prompt(f"look: {IMAGE}", 6))


def test_another_image_misses_from_its_first_token_on_and_each_hits_again(stage: Stage) -> None:
    words = "these words stand before the image in both of the prompts: "

    def cached(seed: int) -> int:
        answer = stage.ask(words, image(seed))
        assert content_of(answer) == stage.expected(stage.prompt(f"{words}{IMAGE}", seed))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    first = stage.prompt(f"{words}{IMAGE}", 21)
    before = first.images[0].position // 4 * 4
    assert cached(21) < before
    assert cached(22) == before
    assert cached(21) == cached(22) == (len(first.token_ids) - 1) // 4 * 4


def test_the_same_picture_in_another_file_is_the_same_image(stage: Stage) -> None:
    shown = picture(30)
    png, webp = data_url(shown), data_url(shown, "WEBP", lossless=True)
    assert png != webp

    answers = [stage.ask("see ", {"type": "image_url", "image_url": {"url": url}}) for url in (png, webp)]

    assert content_of(answers[0]) == content_of(answers[1])
    usage = answers[1].json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 4 * 4


def moving(first: Image.Image) -> str:
    file = BytesIO()
    first.save(file, "GIF", save_all=True, append_images=[picture(99)])
    return f"data:image/gif;base64,{base64.b64encode(file.getvalue()).decode()}"


def rotated() -> str:
    exif = Image.Exif()
    exif[0x0112] = 6
    return data_url(picture(40, 60, 20), "JPEG", exif=exif.tobytes())


@pytest.mark.parametrize(
    "url",
    [
        data_url(picture(40), "JPEG"),
        data_url(picture(40), "JPEG", media_type="image/jpg"),
        data_url(picture(40).convert("P"), "GIF"),
        moving(picture(40)),
        data_url(picture(40).convert("RGBA"), "PNG"),
        data_url(picture(40).convert("L"), "PNG"),
        data_url(picture(40).convert("1"), "PNG"),
        data_url(picture(40).convert("CMYK"), "JPEG"),
        data_url(picture(40, 4, 90), "PNG"),
        rotated(),
    ],
    ids=["jpeg", "jpg", "gif", "moving", "alpha", "grey", "bits", "cmyk", "thin", "rotated"],
)
def test_every_kind_of_picture_is_seen_as_transformers_loads_it(stage: Stage, url: str) -> None:
    whole = f"<|im_start|>user\nsee {IMAGE}<|im_end|>\n<|im_start|>assistant\n"
    prompt = stage.oracle.prompt_of(whole, load_image(url))

    answer = stage.ask("see ", {"type": "image_url", "image_url": {"url": url}})

    assert content_of(answer) == stage.expected(prompt)


def test_images_stand_in_every_message_of_a_long_conversation(stage: Stage) -> None:
    messages: list[Part] = [
        {"role": "user", "content": [image(1), text("one?")]},
        {"role": "assistant", "content": "two."},
        {"role": "user", "content": [text("and "), image(2)]},
    ]
    rendered = (
        f"<|im_start|>user\n{IMAGE}one?<|im_end|>\n<|im_start|>assistant\ntwo.<|im_end|>\n"
        f"<|im_start|>user\nand {IMAGE}<|im_end|>\n<|im_start|>assistant\n"
    )

    answer = stage.chat(messages)

    assert content_of(answer) == stage.expected(stage.oracle.prompt(rendered, 1, 2))


def test_many_clients_at_once_see_their_own_images(stage: Stage) -> None:
    expected = {seed: stage.expected(stage.prompt(f"a {IMAGE} b", seed)) for seed in range(50, 58)}
    with ThreadPoolExecutor(8) as clients:
        found = {seed: clients.submit(stage.ask, "a ", image(seed), " b") for seed in expected}
        assert {seed: content_of(answer.result()) for seed, answer in found.items()} == expected
    assert len(set(expected.values())) > 1
    stage.server.wait_idle()


def test_the_model_card_says_that_images_are_taken(stage: Stage) -> None:
    [card] = stage.server.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image"]
