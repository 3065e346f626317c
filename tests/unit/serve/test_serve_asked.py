"""Names, tokenizer and chat template that are set beside a model: what is wrong is said before a model is loaded."""

from pathlib import Path

import pytest
from tiny_models import tiny_tokenizer

from kvwatch.errors import ConfigError
from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.serve.asked import asked_model
from kvwatch_engine.serve.settings import ServeSettings


def test_nothing_set_leaves_the_model_its_own() -> None:
    asked = asked_model(ServeSettings(), ())

    assert asked.names == ()
    assert (asked.texts.tokenizer, asked.texts.chat_template) == (None, None)


def test_names_keep_their_order() -> None:
    settings = ServeSettings(served_model_name=("gpt-4o", "my model"))

    assert asked_model(settings, ()).names == ("gpt-4o", "my model")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a", "b", "a"), "'a' is given twice"),
        (("",), "'' is no name"),
        (("  ",), "is no name"),
        (("a\nb",), "is no name; use 1 to 256 printable"),
        (("a" * 257,), "is no name"),
        (("sql",), "'sql' is the name of a --lora as well"),
        (tuple(map(str, range(17))), "17 names, the limit is 16"),
    ],
)
def test_names_that_cannot_be_served_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--served-model-name.*{message}"):
        asked_model(ServeSettings(served_model_name=names), (("sql", Path("/adapters/sql")),))


def test_a_template_is_read_whole_with_what_transformers_adds_to_jinja(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    path = tmp_path / "chat.jinja"
    path.write_text(template)

    assert asked_model(ServeSettings(chat_template=str(path)), ()).texts.chat_template == template


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{% for m in messages %}\n{{ m.content }", r"line 2: .*; correct it"),
        (b"{% nonsense %}", "line 1: Encountered unknown tag 'nonsense'"),
        (b" \n", "is empty"),
        (b"\xff\xfe", r"cannot be read \('utf-8' codec"),
        (b"x" * (1 << 20) + b"x", "is larger than 1048576 bytes"),
    ],
)
def test_what_is_no_template_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=f"--chat-template: .*{message}"):
        asked_model(ServeSettings(chat_template=str(path)), ())


@pytest.mark.parametrize("name", ["no/such/file.jinja", "", "~nobody-here/chat.jinja", "{{ messages }}"])
def test_a_template_that_is_no_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template: .*(give a file|write the path in full)"):
        asked_model(ServeSettings(chat_template=name), ())


def test_a_tokenizer_is_a_folder_that_holds_one(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)

    assert asked_model(ServeSettings(tokenizer=str(tmp_path)), ()).texts.tokenizer == tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", "is no folder; give one with tokenizer.json"),
        ("", "is no folder"),
        (__file__, "is no folder"),
        (str(Path(__file__).parent), r"is a folder without tokenizer\.json"),
    ],
)
def test_what_is_no_tokenizer_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"tokenizer '.*' {message}"):
        asked_model(ServeSettings(tokenizer=name), ())
