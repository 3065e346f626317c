"""What is wrong with a request is said with the remedy: a name that is not known with the nearest one that is."""

import json
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from kvwatch.admin.act import Pin
from kvwatch.admin.config import ConfigChange
from kvwatch.admin.decoding import MAX_SHOWN_NAME, decode_body, decode_query
from kvwatch.admin.inspect import BlocksQuery
from kvwatch.admin.problems import Problem


@pytest.mark.parametrize(
    ("kind", "body", "detail"),
    [
        (ConfigChange, {"changes": {"num_block": 5}, "reason": "x"}, "did you mean num_blocks?"),
        (ConfigChange, {"changes": {"port": 5}, "reason": "x"}, "or cannot change while the engine runs; known: num_"),
        (
            ConfigChange,
            {"change": {"num_blocks": 5}, "reason": "x"},
            "field 'change' is unknown; did you mean changes?",
        ),
        (Pin, {"tokens": [5], "reason": "x"}, "did you mean token_ids?"),
        (Pin, {"` - at `$.reason`": 5, "reason": "x"}, "is unknown; known: reason, token_ids"),
        (ConfigChange, {"changes": {"num_blocks": "5"}, "reason": "x"}, "`$.changes.num_blocks`"),
        (ConfigChange, {"changes": {"log_level": "trace"}, "reason": "x"}, "give one of debug, error, info, warning"),
        (ConfigChange, {"changes": {"log_level": "` - at `$.no"}, "reason": "x"}, "give one of debug"),
        (ConfigChange, {"changes": [], "reason": "x"}, "Expected `object`"),
        (ConfigChange, [], "Expected `object`"),
    ],
)
def test_a_body_that_is_wrong_is_refused_with_the_remedy(kind: type[msgspec.Struct], body: Any, detail: str) -> None:
    with pytest.raises(Problem) as caught:
        decode_body(json.dumps(body).encode(), kind)

    assert caught.value.kind.status == 422
    assert detail in caught.value.detail


def test_only_the_beginning_of_a_long_name_is_said_again() -> None:
    with pytest.raises(Problem) as caught:
        decode_body(json.dumps({"x" * 100_000: 1}).encode(), ConfigChange)

    assert "x" * MAX_SHOWN_NAME in caught.value.detail
    assert "x" * (MAX_SHOWN_NAME + 1) not in caught.value.detail


@pytest.mark.parametrize(
    ("query", "status", "detail"),
    [
        (b"stat=used", 422, "parameter 'stat' is unknown; did you mean state?"),
        (b"state=use", 422, "give one of cached, empty, used"),
        (b"limit=many", 422, "a parameter is wrong"),
        (b"state=used&state=used", 400, "given twice"),
        (b"state=" + b"x" * 9000, 400, "ask for less"),
    ],
)
def test_a_query_that_is_wrong_is_refused_with_the_remedy(query: bytes, status: int, detail: str) -> None:
    with pytest.raises(Problem) as caught:
        decode_query(BlocksQuery, Request({"type": "http", "query_string": query, "headers": []}))

    assert caught.value.kind.status == status
    assert detail in caught.value.detail
