"""`traceparent`, as the W3C's trace context level 1 and its processing rules define it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvwatch.telemetry.trace_context import TraceContext, begin_trace, is_trace_id, read_trace_parent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEX = "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceContext(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-00", TraceContext(TRACE, SPAN, False)),
        (f"00-{TRACE}-{SPAN}-ff", TraceContext(TRACE, SPAN, True)),
        (f" 00-{TRACE}-{SPAN}-01\t", TraceContext(TRACE, SPAN, True)),
        (f"cc-{TRACE}-{SPAN}-01", TraceContext(TRACE, SPAN, True)),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", TraceContext(TRACE, SPAN, True)),
    ],
)
def test_a_valid_traceparent_is_read(text: str, expected: TraceContext) -> None:
    assert read_trace_parent(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01more",
        f"00-{TRACE}-{SPAN}-0",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-0\u0661",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 1000,
    ],
)
def test_anything_else_is_no_context(text: str) -> None:
    assert read_trace_parent(text) is None


@given(
    st.text("0123456789abcdef-", max_size=60)
    | st.tuples(
        st.sampled_from(["00", "01", "ff"]),
        st.text(HEX, min_size=31, max_size=33),
        st.text(HEX, min_size=15, max_size=17),
        st.text(HEX, min_size=2, max_size=2),
    ).map("-".join)
)
def test_it_is_read_as_opentelemetry_reads_it(text: str) -> None:
    context = TraceContextTextMapPropagator().extract({"traceparent": text})
    theirs = get_current_span(context).get_span_context()

    ours = read_trace_parent(text)

    assert (ours is not None) == theirs.is_valid
    if ours is not None:
        assert (int(ours.trace_id, 16), int(ours.parent_id, 16)) == (theirs.trace_id, theirs.span_id)
        assert ours.is_sampled == theirs.trace_flags.sampled


def test_a_trace_that_begins_here_has_no_parent_and_only_we_may_say_so() -> None:
    context = begin_trace()

    assert is_trace_id(context.trace_id)
    assert context.parent_id == ""
    assert read_trace_parent(context.to_trace_parent()) is None
    assert read_trace_parent(context.to_trace_parent(), may_begin=True) == context
    assert begin_trace() != begin_trace()


def test_writing_and_reading_are_inverse() -> None:
    for text in (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"):
        context = read_trace_parent(text)
        assert context is not None
        assert context.to_trace_parent() == text
