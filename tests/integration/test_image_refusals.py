"""What a server that takes images refuses, and how: by name, with value, limit and remedy, before anything large."""

import asyncio
import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import openai
import pytest
from image_oracle import Oracle
from image_stage import LIMITS, NAME, Part, Stage, content_of, data_url, error_of, image, serving, text
from PIL import Image
from tiny_models import make_tiny_model
from tiny_vision_model import CHAT_TEMPLATE, IMAGE, make_tiny_vision_model, picture

from kvwatch_engine.contracts.errors import EngineOverloaded, ModelError
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.server.conversation import ImagePart, Turn
from kvwatch_engine.server.image_prompts import ImagePrompts
from kvwatch_engine.server.prompts import ChatPrompt, PromptEncoder
from kvwatch_engine.server.tokenizer import Tokenizer

URL = "messages[0].content[0].image_url.url"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[Stage]:
    with serving(folder) as server:
        yield Stage(server, Oracle(folder))


def with_url(url: object) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def png_that_claims(width: int, height: int) -> str:
    """Return a PNG of next to nothing whose header claims a size."""
    file = BytesIO()
    picture(1).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return f"data:image/png;base64,{base64.b64encode(bytes(data)).decode()}"


def half_of(url: str) -> str:
    prefix, data = url.split(",")
    return f"{prefix},{data[: len(data) // 8 * 4]}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/cat.png", "'https://example.org/cat.png', and this server fetches none; send data:"),
        ("file:///etc/passwd", "this server fetches none"),
        ("/etc/passwd", "this server fetches none"),
        ("", "this server fetches none"),
        ("data:", "is no data URL"),
        ("data:image/png;base64", "is no data URL"),
        ("data:image/png,%89PNG", "is not in base64"),
        ("data:;base64,AAAA", "is of type text/plain; send one of image/png"),
        ("data:image/svg+xml;base64,AAAA", r"is of type image/svg\+xml; send one of"),
        ("data:application/pdf;base64,AAAA", "is of type application/pdf"),
        ("data:image/png;base64,", "cannot be decoded"),
        ("data:image/png;base64,AAA", "is not valid base64"),
        ("data:image/png;base64,AA AA", "is not valid base64"),
        ("data:image/png;base64,größe", "is not valid base64"),
        ("data:image/png;base64,AAAA", r"cannot be decoded \(UnidentifiedImageError\); send a whole file as PNG"),
        (data_url(picture(1), "BMP", media_type="image/png"), "cannot be decoded"),
        (data_url(picture(1), "TIFF", media_type="image/png"), "cannot be decoded"),
        (half_of(data_url(picture(1, 80, 80))), "cannot be decoded"),
        (data_url(picture(1, 104, 100)), "has 104 x 100 pixels, but 10000 in all are the limit; scale it down"),
        (png_that_claims(30_000, 30_000), "pixels, but 10000 in all are the limit"),
        (png_that_claims(12_000, 9_000), "pixels, but 10000 in all are the limit"),
        (data_url(Image.new("RGB", (505, 5))), "longer side may be 100 times the shorter one"),
    ],
    ids=lambda value: value[:40],
)
def test_an_image_that_cannot_be_taken_is_refused_with_its_place_and_the_remedy(
    stage: Stage, url: str, message: str
) -> None:
    error = error_of(stage.ask(with_url(url)))

    assert error["param"] == URL
    assert re.search(message, error["message"]), error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": None}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, "messages[0].content[0].image_url"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url.url"),
        (image(1, detail="closely"), "messages[0].content[0].image_url.detail"),
        ({"type": "image"}, "messages[0].content[0].type"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "messages[0].content[0].type"),
        (text(f"what is {IMAGE}?"), "messages[0].content[0].text"),
    ],
    ids=str,
)
def test_a_part_that_is_not_as_it_should_be_is_refused_with_its_place(stage: Stage, part: Part, param: str) -> None:
    assert error_of(stage.ask(part))["param"] == param


def test_more_images_and_more_bytes_than_the_limits_are_refused(stage: Stage) -> None:
    assert "there are 4 images, the limit is 3" in error_of(stage.ask(*map(image, range(4))))["message"]

    noise = Image.effect_noise((100, 100), 90).convert("RGB")
    large = [with_url(data_url(noise, "JPEG", quality=100)) for _ in range(3)]
    message = error_of(stage.ask(*large))["message"]
    assert re.match(r"the images have \d{5,} bytes, the limit is 40000 in all; scale them down", message)


def test_a_prompt_too_long_is_refused_before_its_images_are_decoded(stage: Stage) -> None:
    error = error_of(stage.ask("word " * 380, with_url("data:image/png;base64,AAAA")))
    assert error["code"] == "context_length_exceeded"


def test_a_body_may_be_longer_by_what_images_take_and_no_more(folder: Path) -> None:
    limits = replace(LIMITS, max_body_bytes=1_000)
    with serving(folder, limits) as server:
        stage = Stage(server, Oracle(folder))
        assert len(str(image(1))) > 1_000
        content_of(stage.ask(image(1)))
        error_of(stage.ask("x" * 60_000), 413)
        body = {"model": NAME, "prompt": "x" * 2_000}
        error_of(server.post("/v1/completions", **body), 413)


async def outcomes(encoder: PromptEncoder, *turns: Turn) -> list[object]:
    """Return what comes of prompts that are sent at the same moment."""
    return await asyncio.gather(*(encoder.encode_chat([turn], {}) for turn in turns), return_exceptions=True)


def test_images_that_wait_to_be_decoded_have_a_bound(folder: Path) -> None:
    urls = [data_url(picture(seed)) for seed in range(3)]
    limits = replace(LIMITS, max_image_bytes=1, max_pending_image_bytes=2 * len(urls[0]))
    model, tokenizer = load_model(str(folder)).info, Tokenizer.load(folder)
    images = ImagePrompts.of_model(model, tokenizer, replace(limits, max_image_bytes=10_000))
    encoder = PromptEncoder(tokenizer, limits, lambda: 400, images)
    turns = [Turn("user", (ImagePart(url, "here"),)) for url in urls]

    first, second, third = asyncio.run(outcomes(encoder, *turns))

    assert isinstance(first, ChatPrompt)
    assert isinstance(second, ChatPrompt)
    assert first.images[0].image != second.images[0].image
    assert isinstance(third, EngineOverloaded)
    assert third.reason == "queue_full"
    assert f"the limit is {2 * len(urls[0])}" in str(third)
    [again] = asyncio.run(outcomes(encoder, turns[2]))
    assert isinstance(again, ChatPrompt)
    encoder.close()


@pytest.mark.parametrize("prompt", [f"a {IMAGE} b", [1, 512, 2], ["fine", IMAGE]])
def test_plain_prompts_cannot_hold_placeholders(stage: Stage, prompt: object) -> None:
    error = error_of(stage.server.post("/v1/completions", model=NAME, prompt=prompt, max_tokens=2))
    assert error["param"] == "prompt"
    assert "has token 512 (<image>), which stands for an image" in error["message"]


def test_the_official_client_raises_its_own_error(stage: Stage) -> None:
    with stage.server.openai() as client, pytest.raises(openai.BadRequestError, match="fetches none") as caught:
        client.chat.completions.create(
            model=NAME,
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}
            ],
        )
    assert caught.value.code == "unsupported"


def test_nothing_of_refused_requests_stays_behind(stage: Stage) -> None:
    for _ in range(3):
        error_of(stage.ask(image(1), with_url("data:image/png;base64,AAAA")))
    stage.server.wait_idle()
    content_of(stage.ask(image(1)))


def test_a_model_without_eyes_refuses_images_and_says_why(tmp_path: Path) -> None:
    with serving(make_tiny_model("llama", tmp_path)) as server:
        message = {"role": "user", "content": [text("see"), image(1)]}
        error = error_of(server.post("/v1/chat/completions", model=NAME, messages=[message]))
        assert error["param"] == "messages[0].content[1].type"
        assert error["code"] == "unsupported"
        assert "this model takes no images" in error["message"]
        [card] = server.get("/v1/models").json()["data"]
        assert card["input_modalities"] == ["text"]


# ---------------------------------------------------------------------- templates and processors of model folders


def test_a_template_that_takes_texts_only_finds_the_placeholder_in_its_text(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    folder = make_tiny_vision_model(tmp_path, chat_template=template)
    with serving(folder) as server:
        stage = Stage(server, Oracle(folder))
        answer = stage.ask("look:", image(1), "well?")
        assert content_of(answer) == stage.expected(stage.prompt(f"look:\n{IMAGE}\nwell?", 1))


def test_a_template_in_the_file_of_older_processors_is_found(tmp_path: Path) -> None:
    folder = make_tiny_vision_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    with serving(folder) as server:
        stage = Stage(server, Oracle(folder))
        assert content_of(stage.ask(image(1))) == stage.expected(stage.prompt(IMAGE, 1))


def test_a_template_that_forgets_images_of_a_role_is_no_reason_to_answer_without_them(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("part['type'] == 'image'", "part['type'] == 'image' and message['role'] == 'user'")
    template = template.replace("{{ part['text'] }}", "{{ part['text'] or '' }}")
    with serving(make_tiny_vision_model(tmp_path, chat_template=template)) as server:
        messages = [{"role": "system", "content": [image(1)]}, {"role": "user", "content": "what?"}]
        error = error_of(server.post("/v1/chat/completions", model=NAME, messages=messages))
        assert "places 0 of 1 images" in error["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: {**values, "crop_size": {"height": 16, "width": 24}}, r"makes images of \(3, 16, 24\), but"),
        (lambda values: {**values, "image_processor_type": "NoSuch"}, "image processor cannot be loaded"),
    ],
)
def test_an_image_processor_that_does_not_fit_stops_the_start(
    tmp_path: Path, change: Callable[[Part], Part], message: str
) -> None:
    folder = make_tiny_vision_model(tmp_path)
    path = folder / "processor_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "image_processor": change(values["image_processor"])}))
    with pytest.raises(ModelError, match=message), serving(folder):
        pass
