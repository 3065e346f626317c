"""`kvwatch serve` with a model that takes images, from the command line to the metrics."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from bench_runs import bench
from image_stage import data_url
from server_process import NO_FURTHER_PORTS, ServerProcess, serve_process
from tiny_vision_model import NUM_IMAGE_TOKENS, make_tiny_vision_model, picture

MODEL = "tiny-llava"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    flags = [
        "--served-model-name", MODEL, "--num-blocks", "300", "--block-size", "8", "--dtype", "float32",
        "--max-images", "2", "--max-image-pixels", "5000", "--max-image-bytes", "64KiB", "--image-cache", "1MiB",
    ]  # fmt: skip
    with serve_process(folder, *flags) as running:
        yield running


def look(server: ServerProcess, *seeds: int, size: tuple[int, int] = (40, 32)) -> int:
    """Ask about pictures; return the tokens of the prompt."""
    content: Any = [{"type": "image_url", "image_url": {"url": data_url(picture(seed, *size))}} for seed in seeds]
    content.append({"type": "text", "text": "what is it?"})
    with server.openai() as client:
        answer = client.chat.completions.create(
            model=MODEL, max_tokens=8, temperature=0, extra_body={"ignore_eos": True},
            messages=[{"role": "user", "content": content}],
        )  # fmt: skip
    assert answer.usage is not None
    return answer.usage.prompt_tokens


def test_images_count_as_prompt_tokens_in_the_answer_and_in_the_metrics(server: ServerProcess) -> None:
    before = server.metrics()

    counts = [look(server), look(server, 1), look(server, 1, 2), look(server, 1, 2)]

    after = server.metrics()
    assert counts[1] == counts[0] + NUM_IMAGE_TOKENS
    assert counts[2] == counts[3] == counts[0] + 2 * NUM_IMAGE_TOKENS
    assert after["kvwatch_prompt_tokens_total"] - before["kvwatch_prompt_tokens_total"] == sum(counts)
    hit = 'kvwatch_prefix_cache_hit_tokens_total{tier="device"}'
    # The last prompt is the one before it, up to its last block; the others begin alike up to their first image.
    assert after[hit] - before[hit] >= (counts[3] - 1) // 8 * 8
    assert after["kvwatch_ledger_violations_total"] == 0


def test_the_limits_are_those_of_the_command_line(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="there are 3 images, the limit is 2"):
        look(server, 1, 2, 3)
    with pytest.raises(openai.BadRequestError, match="has 100 x 80 pixels, but 5000 in all are the limit"):
        look(server, 1, size=(100, 80))


def test_the_load_generator_finds_no_text_of_one_image_in_the_answers_about_another(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = bench(
        capsys, "--url", server.api, "--scenario", "isolation", "--isolation-images", "--num-requests", "40",
        "--concurrency", "8", "--seed", "3", "--assert", "errors==0", "--assert", "isolation_mismatches==0",
    )  # fmt: skip

    assert status == 0, report
    assert {"image 0", "image 1"} <= {str(each) for each in report["isolation"]["variations"]}
    assert report["isolation"]["compared"] == 40


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max-image-bytes", "much"], "--max-image-bytes: 'much' is no size above 0"),
        (["--image-cache", "0"], "--image-cache: '0' is no size above 0"),
        (["--max-images", "-1"], "max-images"),
    ],
    ids=repr,
)
def test_what_is_wrong_at_start_is_said_in_one_line(folder: Path, flags: list[str], reason: str) -> None:
    command = [
        sys.executable,
        "-m",
        "kvwatch",
        "serve",
        "--model",
        str(folder),
        "--port",
        "0",
        *NO_FURTHER_PORTS,
        *flags,
    ]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert ended.returncode != 0
    assert reason in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
