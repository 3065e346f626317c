"""What models write becomes content and calls, the same however the text is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch_engine.server.tools.families import FAMILIES, HERMES, LLAMA3, MISTRAL, Family
from kvwatch_engine.server.tools.reader import Read, ToolReader

NAMES = frozenset({"get_weather", "add"})
WEATHER = '{"name": "get_weather", "arguments": {"city": "K\\u00f6ln \\"}\\"", "days": [1, {"a": 2}]}}'
WEATHER_ARGUMENTS = '{"city": "K\\u00f6ln \\"}\\"", "days": [1, {"a": 2}]}'
ADD = '{"arguments": {"x": 1}, "name": "add"}'

Calls = list[tuple[str, str]]
"""(name, arguments) of each."""


def read_all(family: Family, pieces: list[str], max_calls: int | None = None) -> tuple[str, Calls]:
    reader = ToolReader(family, NAMES, max_calls)
    reads: list[Read] = [*(reader.push(piece) for piece in pieces), reader.flush()]
    calls: dict[int, tuple[str, str]] = {}
    ids: set[str] = set()
    for delta in (delta for read in reads for delta in read.calls):
        if delta.id is not None:
            assert delta.index not in calls, "a call has one name"
            assert delta.id not in ids, "each has an id of its own"
            ids.add(delta.id)
            calls[delta.index] = (delta.name or "", delta.arguments)
        else:
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    assert list(calls) == list(range(len(calls)))
    return "".join(read.content for read in reads), list(calls.values())


CASES: list[tuple[Family, str, str, Calls]] = [
    (HERMES, "Just text with { and <tool and }.", "Just text with { and <tool and }.", []),
    (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("get_weather", WEATHER_ARGUMENTS)]),
    (HERMES, f"Let me see.\n<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>", "Let me see.\n",
     [("get_weather", WEATHER_ARGUMENTS), ("add", '{"x": 1}')]),
    (HERMES, f"<tool_call>{ADD}</tool_call> and then text", "", [("add", '{"x": 1}')]),
    (HERMES, f"<tool_call>{ADD}", "", [("add", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "other", "arguments": {}}</tool_call>', []),
    (HERMES, '<tool_call>{"no": "name"}</tool_call>', '<tool_call>{"no": "name"}</tool_call>', []),
    (HERMES, "<tool_call>nothing", "<tool_call>nothing", []),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"x\\": 2}"}</tool_call>', "", [("add", '{"x": 2}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"x": 12', "", [("add", '{"x": 12')]),
    (LLAMA3, '{"name": "add", "parameters": {"x": 1}}', "", [("add", '{"x": 1}')]),
    (LLAMA3, '<|python_tag|>{"name": "add", "parameters": {"x": 1}}', "", [("add", '{"x": 1}')]),
    (LLAMA3, '{"name": "add", "parameters": {"x": 1}}; {"name": "add", "parameters": {}}', "",
     [("add", '{"x": 1}'), ("add", "{}")]),
    (LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA3, 'As {"name": "add", "parameters": {}} says', 'As {"name": "add", "parameters": {}} says', []),
    (MISTRAL, f"[TOOL_CALLS] [{WEATHER}, {ADD}]", "", [("get_weather", WEATHER_ARGUMENTS), ("add", '{"x": 1}')]),
    (MISTRAL, f"[TOOL_CALLS][{ADD}]", "", [("add", '{"x": 1}')]),
    (MISTRAL, 'Well.[TOOL_CALLS]add{"x": {"y": "}"}}', "Well.", [("add", '{"x": {"y": "}"}}')]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]add[ARGS]{}', "", [("add", '{"x": 1}'), ("add", "{}")]),
    (MISTRAL, "[TOOL_CALLS]unknown{}", "[TOOL_CALLS]unknown{}", []),
    (MISTRAL, "[1, 2] and [TOOL", "[1, 2] and [TOOL", []),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_texts_are_read_as_their_family_writes_them(family: Family, text: str, content: str, calls: Calls) -> None:
    found, found_calls = read_all(family, [text])

    assert found_calls == calls
    assert found.startswith(content)
    if not calls:
        assert found == text
    assert read_all(family, list(text)) == (found, found_calls), "one character at a time"


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=12))
def test_how_a_text_is_cut_does_not_matter(case: tuple[Family, str, str, Calls], cuts: list[int]) -> None:
    family, text, _, _ = case
    places = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})

    pieces = [text[begin:end] for begin, end in pairwise(places)]

    assert read_all(family, pieces) == read_all(family, [text])


_TEXTS = st.text(alphabet='<tool_call>/{}[]":,; \\nameradd[TOOL_CALLS]python_tag|', max_size=60)


@given(st.sampled_from(sorted(FAMILIES)), _TEXTS, st.integers(0, 60))
def test_whatever_is_written_nothing_breaks_and_cutting_changes_nothing(name: str, text: str, cut: int) -> None:
    family = FAMILIES[name]  # type: ignore[index]

    whole = read_all(family, [text])

    assert read_all(family, [text[:cut], text[cut:]]) == whole
    if not whole[1]:
        assert whole[0] == text, "without calls all of it is content"


def test_arguments_are_given_out_while_they_are_written() -> None:
    reader = ToolReader(HERMES, NAMES)
    given_out = [
        "".join(call.arguments for call in reader.push(piece).calls)
        for piece in ("<tool_call>", '{"name": "add", "arguments": ', '{"x"', ": 1", "234", "}", "}", "</tool_call>")
    ]

    assert given_out == ["", "", '{"x"', ": 1", "234", "}", "", ""]


def test_calls_after_the_last_one_that_was_asked_for_are_left_out() -> None:
    text = f"<tool_call>{ADD}</tool_call><tool_call>{WEATHER}</tool_call>"

    assert read_all(HERMES, list(text), max_calls=1) == ("", [("add", '{"x": 1}')])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                    max_leaves=8))  # fmt: skip
def test_any_arguments_come_out_as_they_were_written(value: object) -> None:
    arguments = json.dumps({"value": value})
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'

    assert read_all(HERMES, list(text)) == ("", [("add", arguments)])
