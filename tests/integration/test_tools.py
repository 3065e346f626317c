"""Function calls with the official client, for each family of templates: offered, called, answered."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from openai_server import MODEL, RunningServer
from tool_stage import TEMPLATES, ScriptedModel, TemplateName, tool_server

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 1, "maxItems": 3}},
    "required": ["numbers"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "add": ADD}
TOOLS: list[Any] = [
    {"type": "function",
     "function": {"name": "get_weather", "description": "Tells the weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
]  # fmt: skip
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Wetter in Köln?"}]
CALL = {"city": "Köln", "days": 2}


class Stage:
    """One family's server with its client."""

    def __init__(self, template: TemplateName, server: RunningServer, model: ScriptedModel, client: OpenAI) -> None:
        self.template = template
        self.server = server
        self.model = model
        self.client = client

    def write(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call as the family writes it."""
        match self.template:
            case "llama3":
                return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
            case "mistral":
                return f"[TOOL_CALLS][{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}]"
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def ask(self, **more: Any) -> Any:
        return self.client.chat.completions.create(model=MODEL, messages=more.pop("messages", ASK), **more)

    def post(self, **more: Any) -> httpx.Response:
        return self.server.post("/v1/chat/completions", messages=more.pop("messages", ASK), **more)


@pytest.fixture(scope="module", params=TEMPLATES)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("model")
    with tool_server(folder, request.param) as (server, model), server.openai() as client:
        yield Stage(request.param, server, model, client)


def streamed_calls(chunks: Any) -> tuple[str, list[dict[str, str]], str]:
    """Return content, calls and finish reason of a stream."""
    content, reason = "", ""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(calls)
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
    return content, calls, reason


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_that_the_model_writes_becomes_a_tool_call(stage: Stage, is_stream: bool) -> None:
    stage.model.say(stage.write("get_weather", CALL))

    answer = stage.ask(tools=TOOLS, stream=is_stream)

    if is_stream:
        content, calls, reason = streamed_calls(answer)
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("get_weather", CALL)]
        assert content == ""
    else:
        [choice] = answer.choices
        reason = choice.finish_reason
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "get_weather", CALL)
        assert call.id
    assert reason == "tool_calls"


def test_a_text_without_calls_stays_a_text(stage: Stage) -> None:
    stage.model.say("I do not know, {really}.")

    [choice] = stage.ask(tools=TOOLS).choices
    content, calls, reason = streamed_calls(stage.ask(tools=TOOLS, stream=True))

    assert (choice.message.content, choice.message.tool_calls) == ("I do not know, {really}.", None)
    assert (content, calls) == ("I do not know, {really}.", [])
    assert choice.finish_reason == reason == "stop"


@pytest.mark.parametrize("choice", ["required", "add", "get_weather"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_that_has_to_be_made_is_made_whatever_the_model_would_rather_say(
    stage: Stage, choice: str, is_stream: bool
) -> None:
    wanted: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    stage.model.say("I would rather talk about something else, at length and in detail, " * 4)

    answer = stage.ask(tools=TOOLS, tool_choice=wanted, stream=is_stream, parallel_tool_calls=False, max_tokens=400)

    if is_stream:
        content, calls, reason = streamed_calls(answer)
        [(name, arguments)] = [(call["name"], call["arguments"]) for call in calls]
    else:
        [only] = answer.choices
        content, reason = only.message.content or "", only.finish_reason
        [(name, arguments)] = [(call.function.name, call.function.arguments) for call in only.message.tool_calls]
    assert (content, reason) == ("", "tool_calls")
    assert name in SCHEMAS if choice == "required" else name == choice
    assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(arguments)), arguments


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_strict_function_is_called_with_arguments_that_fit_once_the_model_calls_it(
    stage: Stage, is_stream: bool
) -> None:
    stage.model.say("Let me see. " + stage.write("get_weather", {"city": "Llanfairpwllgwyngyll", "days": 99}) + " So!")

    tools = [strict(TOOLS[0]), TOOLS[1]]
    answer = stage.ask(tools=tools, stream=is_stream, max_tokens=300, parallel_tool_calls=False)

    if is_stream:
        content, calls, _ = streamed_calls(answer)
        arguments = [call["arguments"] for call in calls]
    else:
        [choice] = answer.choices
        content = choice.message.content or ""
        arguments = [call.function.arguments for call in choice.message.tool_calls or []]
    if stage.template == "llama3":
        assert "Llanfairpwllgwyngyll" in content, "nothing marks its calls, so that nothing can be kept to"
        return
    assert content.startswith("Let me see. ")
    assert len(arguments) == 1
    assert jsonschema_rs.is_valid(WEATHER, json.loads(arguments[0])), arguments


def test_what_is_not_strict_takes_any_object_and_texts_stay_free_beside_what_is(stage: Stage) -> None:
    tools = [TOOLS[0], strict(TOOLS[1])]
    loose = {"city": "Llanfairpwllgwyngyll", "days": 99}

    stage.model.say("I do not know, <really>, [at] {all}.")
    [free] = stage.ask(tools=tools).choices
    stage.model.say(stage.write("get_weather", loose))
    [called] = stage.ask(tools=tools, max_tokens=300).choices

    assert (free.message.content, free.message.tool_calls) == ("I do not know, <really>, [at] {all}.", None)
    [call] = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", loose)


def test_several_calls_at_once_unless_that_is_forbidden(stage: Stage) -> None:
    one, other = stage.write("get_weather", CALL), stage.write("add", {"numbers": [1, 30]})
    both = {"llama3": f"{one}; {other}", "mistral": f"{one[:-1]}, {other.removeprefix('[TOOL_CALLS][')}"}
    stage.model.say(both.get(stage.template, f"{one}\n{other}"))

    [choice] = stage.ask(tools=TOOLS).choices
    [alone] = stage.ask(tools=TOOLS, parallel_tool_calls=False).choices

    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "add"]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert [call.function.name for call in alone.message.tool_calls] == ["get_weather"]


def test_each_of_several_choices_has_calls_of_its_own(stage: Stage) -> None:
    stage.model.say(stage.write("add", {"numbers": [2]}))

    answer = stage.ask(tools=TOOLS, n=3)

    assert [choice.message.tool_calls[0].function.name for choice in answer.choices] == ["add"] * 3
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


def test_tools_stand_in_the_prompt_unless_none_may_be_called(stage: Stage) -> None:
    stage.model.say("Fine.")

    stage.ask(tools=TOOLS)
    with_tools = stage.model.last_prompt()
    [choice] = stage.ask(tools=TOOLS, tool_choice="none").choices
    without = stage.model.last_prompt()

    assert "get_weather" in with_tools
    assert "Tells the weather." in with_tools
    assert "get_weather" not in without
    stage.model.say(stage.write("add", {"numbers": [2]}))
    [choice] = stage.ask(tools=TOOLS, tool_choice="none").choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_a_conversation_goes_on_with_the_result_of_a_call(stage: Stage) -> None:
    stage.model.say(stage.write("get_weather", CALL))
    [first] = stage.ask(tools=TOOLS).choices
    [call] = first.message.tool_calls
    stage.model.say("Rain.")

    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        first.message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain, 12 degrees"},
    ]
    [second] = stage.ask(tools=TOOLS, messages=messages).choices

    assert second.message.content == "Rain."
    prompt = stage.model.last_prompt()
    assert "Be brief." in prompt
    assert "rain, 12 degrees" in prompt
    assert prompt.index("Wetter in") < prompt.rindex("get_weather") < prompt.index("rain, 12 degrees")
    counted = httpx.post(f"{stage.server.url}/tokenize", json={
        "messages": [message if isinstance(message, dict) else message.model_dump(exclude_none=True)
                     for message in messages],
        "tools": TOOLS}, timeout=60).json()  # fmt: skip
    assert counted["tokens"] == stage.model.prompts[-1]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [TOOLS[0]] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 70_000}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "textual"}}}],
          "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
         "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_offered_is_refused_by_name(stage: Stage, more: dict[str, Any], param: str) -> None:
    answer = stage.post(**more)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_the_clients_own_helper_reads_a_stream_of_calls(stage: Stage) -> None:
    stage.model.say(stage.write("get_weather", CALL))

    with stage.client.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS) as events:
        final = events.get_final_completion()

    [call] = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == CALL
    assert final.choices[0].finish_reason == "tool_calls"
