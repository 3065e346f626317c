"""`/v1/responses` with the official client: what goes in, what comes out, and how it is told while it is generated."""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText
from openai_server import MODEL
from pydantic import BaseModel
from response_stage import OPEN, ResponseStage, response_stage, turn

SAYING = "Guten Tag, schöne Größe!\n日本語 👋🏽 end"
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object", "properties": {"x": {"enum": [1, 2, 30]}}, "required": ["x"], "additionalProperties": False,
    },
    "strict": True,
}  # fmt: skip
LOOK: dict[str, Any] = {**ADD, "name": "look"}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResponseStage]:
    with response_stage(tmp_path_factory.mktemp("model")) as made:
        yield made


# ---------------------------------------------------------------- input


def test_a_text_is_answered(stage: ResponseStage) -> None:
    answer = stage.ask("Hi", SAYING, instructions="Be kind.", temperature=0.5, top_p=0.9, metadata={"a": "b"})

    assert stage.model.last_prompt() == turn("system", "Be kind.") + turn("user", "Hi") + OPEN
    assert answer.output_text == SAYING
    assert (answer.object, answer.id[:5], answer.model, answer.status) == ("response", "resp_", MODEL, "completed")
    assert (answer.instructions, answer.temperature, answer.top_p) == ("Be kind.", 0.5, 0.9)
    assert (answer.metadata, answer.error, answer.incomplete_details) == ({"a": "b"}, None, None)
    [message] = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "completed")
    usage = answer.usage
    assert usage is not None
    assert usage.input_tokens == len(stage.model.prompts[-1])
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens < usage.input_tokens


def test_a_conversation_is_a_list_of_items_in_which_calls_belong_to_the_message_before_them(
    stage: ResponseStage,
) -> None:
    stage.ask(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
            {"type": "message", "role": "assistant", "content": "Let me see."},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"x": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
            {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c3", "output": ""},
            {"role": "user", "content": "And now?"},
        ],
        "Fine.",
    )

    assert stage.model.last_prompt() == (
        turn("system", "Be brief.") + turn("user", "one\ntwo")
        + turn("assistant", "Let me see." + call("add", '{"x": 1}') + call("add", '{"x": 2}'))
        + turn("tool", "3") + turn("tool", "4") + turn("assistant", call("add", "{}")) + turn("tool", "")
        + turn("user", "And now?") + OPEN
    )  # fmt: skip


def test_a_client_may_send_the_output_back_as_it_came(stage: ResponseStage) -> None:
    made = call("add", '{"x": 2}')
    first = stage.ask("Hi", f"Aha.\n{made}", tools=[ADD])
    stage.ask([{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "So?"}], "Yes.")
    by_hand = stage.model.last_prompt()

    stage.ask("So?", previous_response_id=first.id)

    assert stage.model.last_prompt() == by_hand
    assert "Aha." in by_hand
    assert made in by_hand


# ---------------------------------------------------------------- what went before


def test_a_response_continues_the_one_before_it_but_not_its_instructions(stage: ResponseStage) -> None:
    first = stage.ask("one", "Eins.", instructions="Count.")
    second = stage.ask("two", "Zwei.", previous_response_id=first.id)
    third = stage.ask("three", "Drei.", previous_response_id=second.id, instructions="In German.")
    other = stage.ask("drei", "Vier.", previous_response_id=first.id)

    assert stage.model.last_prompt() == turn("user", "one") + turn("assistant", "Eins.") + turn("user", "drei") + OPEN
    stage.ask("four", previous_response_id=third.id)
    assert stage.model.last_prompt() == "".join(
        turn(role, text)
        for role, text in [
            ("user", "one"), ("assistant", "Eins."), ("user", "two"), ("assistant", "Zwei."), ("user", "three"),
            ("assistant", "Drei."), ("user", "four"),
        ]
    ) + OPEN  # fmt: skip
    assert (second.previous_response_id, other.previous_response_id) == (first.id, first.id)


def test_a_kept_response_can_be_read_listed_and_forgotten(stage: ResponseStage) -> None:
    first = stage.ask("one", "Eins.", user="somebody")
    second = stage.ask([{"role": "user", "content": "two"}], "Zwei.", previous_response_id=first.id)

    assert stage.client.responses.retrieve(first.id) == first
    listed = [item.to_dict() for item in stage.client.responses.input_items.list(second.id, limit=1, order="asc")]
    assert [(item["role"], item["content"][0]["text"]) for item in listed] == [  # type: ignore[index]
        ("user", "one"), ("assistant", "Eins."), ("user", "two"),
    ]  # fmt: skip
    newest_first = stage.client.responses.input_items.list(second.id)
    assert [item.id for item in newest_first] == [item["id"] for item in reversed(listed)]
    assert not newest_first.has_more

    stage.client.responses.delete(first.id)

    for gone in (
        stage.server.get(f"/v1/responses/{first.id}"),
        stage.server.get(f"/v1/responses/{first.id}/input_items"),
    ):
        assert gone.status_code == 404
        assert first.id in gone.json()["error"]["message"]
    assert stage.post(previous_response_id=first.id).json()["error"]["code"] == "previous_response_not_found"
    stage.ask("three", previous_response_id=second.id)
    assert turn("assistant", "Eins.") in stage.model.last_prompt(), "what a kept response answers stays with it"


def test_what_shall_not_be_stored_is_not(stage: ResponseStage) -> None:
    answer = stage.ask("one", "Eins.", store=False)

    assert answer.to_dict()["store"] is False
    assert stage.server.get(f"/v1/responses/{answer.id}").status_code == 404


def test_kept_items_may_be_named_instead_of_sent_again(stage: ResponseStage) -> None:
    first = stage.ask("Hi", "Aha.")
    given: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "So?"},
    ]

    stage.ask(given, "Yes.")

    assert stage.model.last_prompt() == turn("user", "Hi") + turn("assistant", "Aha.") + turn("user", "So?") + OPEN
    stage.client.responses.delete(first.id)
    assert stage.post(input=given).status_code == 200, "the second response keeps it"


# ---------------------------------------------------------------- streams


def test_the_events_of_a_text_come_in_order_and_say_what_the_response_says(stage: ResponseStage) -> None:
    events = stage.stream("Hi", SAYING, instructions="Be kind.")

    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    num_deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert num_deltas > 5
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-4].text == events[-3].part.text == events[-2].item.content[0].text == SAYING
    assert "".join(text.split("\ufffd")) == text
    created, final = events[0].response, events[-1].response
    assert (created.id, created.status, created.output, created.usage) == (final.id, "in_progress", [], None)
    assert (events[2].item.content, events[2].item.status) == ([], "in_progress")
    assert {event.item_id for event in events[4:-3]} == {final.output[0].id}
    assert final.output_text == SAYING
    assert stage.client.responses.retrieve(final.id) == final
    assert final.usage.output_tokens == len(stage.model.encode(SAYING)) + 1


def test_a_stream_names_its_events_and_ends_without_a_mark(stage: ResponseStage) -> None:
    stage.model.say("Yes.")

    lines = stage.post(stream=True).text.splitlines()

    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    told = [json.loads(line.removeprefix("data: "))["type"] for line in lines if line.startswith("data: ")]
    assert named == told
    assert named[0] == "response.created"


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_items_of_their_own_whether_streamed_or_not(stage: ResponseStage, parallel: bool) -> None:
    says = "\n".join(["Let me see.", call("add", '{"x": 30}'), call("look", '{"x": 1}'), "That was it."])
    tools: list[Any] = [{**ADD, "strict": False}, {**LOOK, "strict": False}]
    whole = stage.ask("Hi", says, tools=tools, parallel_tool_calls=parallel)
    stage.model.say(says)

    with stage.client.responses.stream(model=MODEL, input="Hi", tools=tools, parallel_tool_calls=parallel) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()

    def told(answer: Any) -> list[tuple[str, ...]]:
        return [
            ("message", item.content[0].text) if item.type == "message" else (item.name, item.arguments, item.status)
            for item in answer.output
        ]

    calls = [("add", '{"x": 30}', "completed"), ("look", '{"x": 1}', "completed")]
    assert told(whole) == told(final)
    assert told(whole)[:2] == [("message", "Let me see.\n"), calls[0]]
    assert [entry for entry in told(whole) if entry[0] != "message"] == calls[: 2 if parallel else 1]
    assert told(whole)[-1][0] == "message"
    assert told(whole)[-1][1].strip() == "That was it."
    ids = [item.call_id for item in whole.output if isinstance(item, ResponseFunctionToolCall)]
    assert len(set(ids)) == len(ids)
    assert kinds.count("response.function_call_arguments.done") == len(ids)
    assert kinds[-1] == "response.completed"


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"add", "look"}),
        ({"type": "function", "name": "look"}, {"look"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}, {"look"}),
    ],
)
def test_a_call_that_has_to_be_made_is_made(stage: ResponseStage, choice: Any, names: set[str]) -> None:
    answer = stage.ask(
        "Hi", "I would rather not. " * 9, tools=[ADD, LOOK], tool_choice=choice, parallel_tool_calls=False
    )

    [only] = answer.output
    assert isinstance(only, ResponseFunctionToolCall)
    assert only.name in names
    assert json.loads(only.arguments)["x"] in (1, 2, 30)
    assert "add" in stage.model.last_prompt(), "all tools stand in the prompt"


def test_a_function_that_is_not_allowed_is_not_called(stage: ResponseStage) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}

    loose = [{**ADD, "strict": False}, {**LOOK, "strict": False}]

    answer = stage.ask("Hi", call("add", '{"x": 1}'), tools=loose, tool_choice=allowed)

    assert [item.type for item in answer.output] == ["message"]


def test_the_result_of_a_call_continues_the_response_that_made_it(stage: ResponseStage) -> None:
    first = stage.ask("Hi", call("add", '{"x": 1}'), tools=[ADD])
    [made] = first.output
    assert isinstance(made, ResponseFunctionToolCall)

    second = stage.ask(
        [{"type": "function_call_output", "call_id": made.call_id, "output": "3"}],
        "Three.",
        previous_response_id=first.id,
    )

    assert second.output_text == "Three."
    assert stage.model.last_prompt().endswith(
        turn("user", "Hi") + turn("assistant", call("add", '{"x": 1}')) + turn("tool", "3") + OPEN
    )


def test_a_call_that_is_cut_short_is_incomplete_and_left_out_of_what_continues_it(stage: ResponseStage) -> None:
    says = call("add", '{"x": 1}')
    num_tokens = len(stage.model.encode(says.split('"x"')[0]))
    first = stage.ask("Hi", says, tools=[ADD], max_output_tokens=num_tokens)

    [made] = first.output
    assert isinstance(made, ResponseFunctionToolCall)
    assert (first.status, made.status) == ("incomplete", "incomplete")
    stage.ask("So?", "Yes.", previous_response_id=first.id)
    assert stage.model.last_prompt() == turn("user", "Hi") + turn("user", "So?") + OPEN


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_that_uses_up_its_tokens_is_incomplete_and_says_why(stage: ResponseStage, is_stream: bool) -> None:
    stage.model.say(SAYING)

    if is_stream:
        events = stage.stream(max_output_tokens=3)
        answer = events[-1].response
        assert events[-1].type == "response.incomplete"
    else:
        answer = stage.ask(max_output_tokens=3)

    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    assert SAYING.startswith(answer.output_text)


def test_an_answer_without_a_text_is_an_empty_message(stage: ResponseStage) -> None:
    stage.model.say_tokens([3])

    for answer in (stage.ask(), stage.ask(tools=[ADD]), stage.stream()[-1].response):
        [message] = answer.output
        assert isinstance(message, ResponseOutputMessage)
        [part] = message.content
        assert isinstance(part, ResponseOutputText)
        assert part.text == ""


def test_a_request_that_takes_too_long_fails_with_an_event_of_its_own(stage: ResponseStage) -> None:
    stage.model.say("again and again " * 60)
    stage.model.on_step = lambda _step: time.sleep(0.02)
    try:
        events = stage.stream(extra_body={"deadline_seconds": 0.3})
        refused = stage.post(deadline_seconds=0.3)
    finally:
        stage.model.on_step = lambda _step: None

    failed = events[-1]
    assert (failed.type, failed.response.status, failed.response.error.code) == (
        "response.failed", "failed", "server_error",
    )  # fmt: skip
    assert "deadline" in failed.response.error.message
    assert [item.status for item in failed.response.output] == ["incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert stage.server.get(f"/v1/responses/{failed.response.id}").status_code == 404
    assert refused.status_code == 504


@pytest.mark.parametrize("is_stream", [False, True])
def test_hanging_up_ends_the_work(stage: ResponseStage, is_stream: bool) -> None:
    stage.model.say("again and again " * 100)
    stage.model.on_step = lambda _step: time.sleep(0.02)
    body = {"model": MODEL, "input": "Hi", "stream": is_stream}
    try:
        with contextlib.suppress(httpx.TimeoutException):
            url = f"{stage.server.url}/v1/responses"
            with httpx.stream("POST", url, json=body, timeout=60 if is_stream else 0.5) as answer:
                next(line for line in answer.iter_lines() if "output_text.delta" in line)
        stage.server.wait_idle()
    finally:
        stage.model.on_step = lambda _step: None


# ---------------------------------------------------------------- structured output


class Answer(BaseModel):
    x: int
    ok: bool


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_schema_is_kept_to_and_parsed(stage: ResponseStage, is_stream: bool) -> None:
    stage.model.say("7")
    if is_stream:
        with stage.client.responses.stream(
            model=MODEL, input="Hi", text_format=Answer, max_output_tokens=400
        ) as events:
            parsed: Any = events.get_final_response()
    else:
        parsed = stage.client.responses.parse(model=MODEL, input="Hi", text_format=Answer, max_output_tokens=400)

    assert isinstance(parsed.output_parsed, Answer)
    assert parsed.text.format.name == "Answer"


def test_any_object_is_kept_to(stage: ResponseStage) -> None:
    answer = stage.ask("Hi", '{"a": [1, {}]}', text={"format": {"type": "json_object"}}, max_output_tokens=400)

    assert json.loads(answer.output_text) == {"a": [1, {}]}
    assert stage.ask("Hi", "No.", text={"format": {"type": "json_object"}}, max_output_tokens=9).output_text[0] == "{"
