"""`/v1/responses`: what is refused, what is cut, what is kept for whom and for how long."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai_server import MODEL, RunningServer
from response_stage import OPEN, ResponseStage, client_of, response_stage, turn

from kvwatch_engine.server import ServerSettings
from kvwatch_engine.server.api_keys import ApiKeys

ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResponseStage]:
    with response_stage(tmp_path_factory.mktemp("model")) as made:
        yield made


# ---------------------------------------------------------------- refused by name


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"content": "no role"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"background": True}, "background"), ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"), ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"), ({"n": 2}, "n"), ({"use_beam_search": True}, "use_beam_search"),
        ({"max_tokens": 3}, "max_tokens"), ({"messages": []}, "messages"), ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"), ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"), ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [ADD]}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"include": ["everything"]}, "include"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"tools": [ADD], "include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"), ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 9999}, "max_output_tokens"), ({"input": "x" * 400_000}, "input"),
        ({"truncation": "some"}, "truncation"), ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"), ({"user": "u" * 513}, "user"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"x": True}}, "chat_template_kwargs.x"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(stage: ResponseStage, body: dict[str, Any], param: str) -> None:
    answer = stage.post(**body)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_values_that_ask_for_nothing_are_accepted(stage: ResponseStage) -> None:
    answer = stage.post(
        background=False, conversation=None, prompt=None, reasoning={"effort": None, "summary": "auto"}, tools=[],
        include=["reasoning.encrypted_content"], text={"format": {"type": "text"}, "verbosity": "medium"},
        service_tier="auto", prompt_cache_key="k", safety_identifier="s", user="u", max_tool_calls=3, store=True,
        truncation="disabled", parallel_tool_calls=False, tool_choice="none", stream=False, top_logprobs=0,
        something_new={"a": 1},
    )  # fmt: skip

    told = answer.json()
    assert answer.status_code == 200
    assert (told["prompt_cache_key"], told["safety_identifier"], told["user"], told["max_tool_calls"]) == (
        "k",
        "s",
        "u",
        3,
    )
    assert (told["service_tier"], told["parallel_tool_calls"], told["tool_choice"]) == ("default", False, "none")


def test_embedded_sampling_parameters_of_the_other_apis_work_here_as_well(stage: ResponseStage) -> None:
    stage.model.say("one two three four")

    answer = stage.ask(extra_body={"stop": ["three"], "seed": 3, "top_k": 5, "cache_salt": "s", "priority": 1})

    assert answer.output_text == "one two "


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?limit=0", "limit"),
        ("?limit=101", "limit"),
        ("?limit=x", "limit"),
        ("?order=up", "order"),
        ("?after=x", "after"),
    ],
)
def test_a_page_that_does_not_exist_is_refused(stage: ResponseStage, query: str, param: str) -> None:
    answer = stage.ask()

    refused = stage.server.get(f"/v1/responses/{answer.id}/input_items{query}")

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_responses_that_have_ended_are_neither_streamed_nor_cancelled(stage: ResponseStage) -> None:
    answer = stage.ask()

    assert stage.server.get(f"/v1/responses/{answer.id}?stream=true").json()["error"]["param"] == "stream"
    assert stage.server.post(f"/v1/responses/{answer.id}/cancel").status_code == 400
    assert stage.server.post("/v1/responses/resp_none/cancel").status_code == 404


# ---------------------------------------------------------------- truncation


def words(number: int) -> str:
    return f"{number} " + "word " * 40


def test_the_oldest_turns_go_until_the_prompt_fits_and_never_one_too_many(tmp_path: Path) -> None:
    with response_stage(tmp_path, max_model_len=400) as stage:
        stage.model.say("Fine.")
        given: list[dict[str, Any]] = []
        for number in range(9):
            given += [{"role": "user", "content": words(number)}, {"role": "assistant", "content": f"answer {number}"}]
        given.append({"role": "user", "content": "last"})
        refused = stage.post(input=given)

        answer = stage.ask(given, truncation="auto", instructions="Stay.", max_output_tokens=30)

        assert refused.json()["error"]["code"] == "context_length_exceeded"
        prompt = stage.model.last_prompt()
        turns = [turn(item["role"], item["content"]) for item in given]
        kept = next(
            place for place in range(0, 19, 2) if prompt == turn("system", "Stay.") + "".join(turns[place:]) + OPEN
        )
        assert 0 < kept < 18
        assert len(stage.model.prompts[-1]) <= 370
        assert len(stage.model.encode(turn("system", "Stay.") + "".join(turns[kept - 2 :]) + OPEN)) > 370
        assert answer.truncation == "auto"


def test_a_conversation_may_go_on_for_ever_when_its_oldest_turns_may_go(tmp_path: Path) -> None:
    with response_stage(tmp_path, max_model_len=256) as stage:
        stage.model.say("word " * 10)
        before: dict[str, str] = {}
        for number in range(12):
            answer = stage.ask(words(number)[:80], truncation="auto", **before)
            before = {"previous_response_id": answer.id}
            assert answer.status == "completed", number

        assert "11 word" in stage.model.last_prompt()
        assert "0 word" not in stage.model.last_prompt().replace("10 word", "")
        assert stage.post(**before).status_code == 400
        listed = list(stage.client.responses.input_items.list(before["previous_response_id"], order="asc", limit=7))
        assert len(listed) == 23


def test_turns_with_more_characters_than_anybody_would_count_tokens_of_go_as_well(tmp_path: Path) -> None:
    with response_stage(tmp_path, max_model_len=256) as stage:
        stage.model.say("Fine.")
        endless, last = {"role": "user", "content": "word " * 100_000}, {"role": "user", "content": "last"}

        stage.ask([endless, last], truncation="auto")
        refused = stage.post(input=[last, endless], truncation="auto")

        assert stage.model.last_prompt() == turn("user", "last") + OPEN
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert refused.json()["error"]["param"] == "input"


def test_a_result_is_never_left_without_its_call(tmp_path: Path) -> None:
    with response_stage(tmp_path, max_model_len=256) as stage:
        stage.model.say("Fine.")
        given = [
            {"role": "user", "content": "begin"},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "word " * 300},
            {"role": "user", "content": "end"},
        ]

        stage.ask(given, truncation="auto")
        kept = stage.model.last_prompt()
        refused = stage.post(input=given[:-1], truncation="auto")

        assert kept == turn("user", "end") + OPEN
        assert refused.json()["error"]["code"] == "context_length_exceeded"


# ---------------------------------------------------------------- kept, and for whom

BLUE, BLUE_TOO, GREEN = (letter * 20 for letter in "abc")
KEYS = f"""
[keys.laptop]
key = "{BLUE}"
tenant = "blue"
[keys.desktop]
key = "{BLUE_TOO}"
tenant = "blue"
[keys.green]
key = "{GREEN}"
"""


def test_only_the_key_that_made_a_response_finds_it(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    with response_stage(tmp_path, api_keys=ApiKeys(str(tmp_path / "keys.toml")), key=BLUE) as stage:
        answer = stage.ask("secret", "Psst.")

        for key in (BLUE_TOO, GREEN):
            with client_of(stage.server, key) as other:
                for look in (
                    lambda: other.responses.retrieve(answer.id),
                    lambda: other.responses.delete(answer.id),
                    lambda: other.responses.input_items.list(answer.id),
                ):
                    with pytest.raises(openai.NotFoundError):
                        look()
                with pytest.raises(openai.BadRequestError) as refused:
                    other.responses.create(model=MODEL, input="So?", previous_response_id=answer.id)
                assert refused.value.code == "previous_response_not_found"
                named: Any = [{"type": "item_reference", "id": answer.output[0].id}]
                with pytest.raises(openai.BadRequestError):
                    other.responses.create(model=MODEL, input=named)
        nobody = httpx.get(f"{stage.server.url}/v1/responses/{answer.id}", timeout=60)

        assert nobody.status_code == 401
        assert stage.client.responses.retrieve(answer.id) == answer
        assert stage.ask("So?", previous_response_id=answer.id).status == "completed"
        assert turn("user", "secret") in stage.model.last_prompt()


def is_kept(server: RunningServer, response_id: str) -> bool:
    return server.get(f"/v1/responses/{response_id}").status_code == 200


def test_the_oldest_responses_are_dropped_when_there_are_too_many(tmp_path: Path) -> None:
    with response_stage(tmp_path, settings=ServerSettings(max_stored_responses=3)) as stage:
        first = stage.ask("one", "Eins.")
        made = [first.id]
        for number in range(4):
            made.append(stage.ask(str(number), previous_response_id=made[-1]).id)

        assert [is_kept(stage.server, each) for each in made] == [False, False, True, True, True]
        stage.ask("end", previous_response_id=made[-1])
        assert stage.model.last_prompt().startswith(turn("user", "one") + turn("assistant", "Eins."))


def test_the_oldest_responses_are_dropped_when_they_are_too_large(tmp_path: Path) -> None:
    with response_stage(tmp_path, settings=ServerSettings(max_stored_response_bytes=12_000)) as stage:
        small, large = stage.ask("one", "Eins."), stage.ask("x" * 1500)
        assert is_kept(stage.server, small.id)
        assert is_kept(stage.server, large.id)

        larger = [stage.ask("x" * 1500).id for _ in range(3)]

        assert not is_kept(stage.server, small.id)
        assert is_kept(stage.server, larger[-1])


def test_a_server_may_keep_nothing(tmp_path: Path) -> None:
    with response_stage(tmp_path, settings=ServerSettings(max_stored_responses=0)) as stage:
        answer = stage.ask("one", "Eins.", store=True)

        assert answer.to_dict()["store"] is False
        assert not is_kept(stage.server, answer.id)


def test_many_conversations_at_once_keep_what_is_theirs(tmp_path: Path) -> None:
    def talk(stage: ResponseStage, name: str) -> None:
        before: dict[str, str] = {}
        told = ""
        for number in range(6):
            answer = stage.ask(f"{name}{number}", **before)
            told += f"{name}{number} {answer.output_text} "
            before = {"previous_response_id": answer.id}
        kept = stage.client.responses.input_items.list(answer.id, order="asc", limit=100)
        listed = [item.to_dict()["content"][0]["text"] for item in kept]  # type: ignore[index]
        assert " ".join([*listed, answer.output_text, ""]) == told
        stage.client.responses.delete(answer.id)
        assert not is_kept(stage.server, answer.id)

    with response_stage(tmp_path) as stage, ThreadPoolExecutor(8) as pool:
        stage.model.say("Ja, gut.")
        for done in [pool.submit(talk, stage, f"client{number} ") for number in range(8)]:
            done.result(120)
