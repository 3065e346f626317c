"""What may be set beside the model: names, tokenizer, chat template, what computes it; as one process over HTTP."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from model_families import family
from openai_server import byte_level_tokenizer, save_tokenizer
from server_process import NO_FURTHER_PORTS, ServerProcess, serve_process
from tiny_models import make_tiny_model
from transformers import AutoTokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}[answer]{% endif %}"
)
MESSAGES = [{"role": "user", "content": "What is a block?"}]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tokenizer than the model's own, with fewer tokens."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer(), "{{ 'of the folder' }}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """A model without a tokenizer of its own, on the general path."""
    folder = family("Gemma 2").make(tmp_path_factory.mktemp("model"))
    for path in folder.iterdir():
        if path.name not in ("config.json", "generation_config.json", "model.safetensors"):
            path.unlink()
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with serve_process(
        folder, "--served-model-name", "first", "--served-model-name", "second", "--tokenizer", str(tokenizer_folder),
        "--chat-template", str(template), "--num-blocks", "100", "--dtype", "float32",
    ) as running:  # fmt: skip
        yield running


def test_the_start_message_says_what_computes_the_model(server: ServerProcess) -> None:
    ready = server.lines[-1] if server.lines[-1].get("event") == "ready" else {}

    assert (ready["model"], ready["architecture"], ready["implementation"]) == (
        "first",
        "Gemma2ForCausalLM",
        "transformers",
    )
    assert "window 21" in str(ready["kv_groups"])


def test_every_name_is_served_and_the_first_is_that_of_answers(server: ServerProcess) -> None:
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == ["first", "second"]
        assert client.models.retrieve("second").id == "second"
        texts = set()
        for name in ("first", "second"):
            answer = client.completions.create(model=name, prompt="A block", max_tokens=4, temperature=0)
            assert answer.model == "first"
            texts.add(answer.choices[0].text)
        assert len(texts) == 1
        with pytest.raises(openai.NotFoundError, match="'third' is not served here; use 'first'"):
            client.completions.create(model="third", prompt="x")


def test_metrics_have_the_first_name(server: ServerProcess) -> None:
    text = httpx.get(server.metrics_url, timeout=30).text

    assert 'model_name="first"' in text
    assert '"second"' not in text


def test_prompts_are_what_the_given_template_and_tokenizer_make_of_messages(
    server: ServerProcess, tokenizer_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rendered = "[user] What is a block? [answer]"

    with server.openai() as client:
        answer = client.chat.completions.create(model="second", messages=MESSAGES, max_tokens=4)  # type: ignore[arg-type]

    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer(rendered).input_ids)


def refusal(*flags: str) -> str:
    """Return what `kvwatch serve` says when it refuses to start."""
    command = [
        sys.executable,
        "-m",
        "kvwatch",
        "serve",
        "--port",
        "0",
        *NO_FURTHER_PORTS,
        "--flight-dir",
        "off",
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = make_tiny_model("llama", tmp_path, vocab_size=300)

    said = refusal("--model", str(folder), "--tokenizer", str(tokenizer_folder), "--num-blocks", "50")

    assert "the tokenizer that was given has tokens up to" in said
    assert "the model's vocabulary ends at 299" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dtype", "float16"), "dtype"),
        (("--chat-template", "no/such/file"), "--chat-template: 'no/such/file' cannot be read"),
        (("--tokenizer", "./no/such/folder"), "tokenizer './no/such/folder' is no folder"),
        (("--served-model-name", "a", "--served-model-name", "a"), "'a' is given twice"),
        (("--model-impl", "fast"), "model"),
    ],
)
def test_wrong_values_are_refused_by_name_before_a_model_is_loaded(flags: tuple[str, ...], message: str) -> None:
    said = refusal("--model", "/no/such/model", *flags)

    assert message in said
    assert "/no/such/model" not in said


def test_an_encoder_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")

    assert "it has an encoder; only decoders are served" in refusal("--model", str(tmp_path))
