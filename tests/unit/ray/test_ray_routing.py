import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch_ray.routing import IMBALANCE, PREFIX_CHARACTERS, chosen, prefix_of, ranked

LONG = "x" * PREFIX_CHARACTERS


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (body(prompt=LONG + "a"), body(prompt=LONG + "b", max_tokens=5), True),
        (body(prompt="a" + LONG), body(prompt="b" + LONG), False),
        (body(prompt=[LONG + "a", "z"]), body(prompt=LONG), True),
        (body(prompt=list(range(400))), body(prompt=[*range(399), 7]), True),
        (body(messages=[{"role": "system", "content": LONG}, {"role": "user", "content": "a"}]),
         body(messages=[{"content": LONG, "role": "system"}, {"role": "user", "content": "b"}]), True),
        (body(messages=[{"role": "user", "content": "a"}]), body(messages=[{"role": "user", "content": "b"}]), False),
        (body(prompt=LONG, model="m"), body(prompt=LONG, model="lora"), False),
    ],
)  # fmt: skip
def test_what_begins_alike_has_the_same_prefix(one: bytes, other: bytes, are_equal: bool) -> None:
    assert (prefix_of("/v1/x", one) == prefix_of("/v1/x", other)) is are_equal


@given(st.binary(max_size=300))
def test_any_body_has_a_prefix(sent: bytes) -> None:
    assert len(prefix_of("/v1/completions", sent)) == 32


@pytest.mark.parametrize(
    "sent", [b"[]", b"null", b'{"prompt": null}', b'{"messages": 5}', b'{"model": ["a"]}', b'"\\ud800"']
)
def test_a_body_that_is_no_request_has_one_too(sent: bytes) -> None:
    assert prefix_of("/v1/completions", sent)


@given(st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=8), st.text(max_size=8))
def test_a_replica_that_goes_moves_only_its_own_prefixes(names: set[str], prefix: str) -> None:
    order = ranked(prefix, sorted(names))

    for gone in names:
        rest = ranked(prefix, sorted(names - {gone}))
        assert rest == [name for name in order if name != gone]


def test_prefixes_spread_over_the_replicas() -> None:
    owners = [ranked(str(number), ["a", "b", "c", "d"])[0] for number in range(2000)]

    assert all(400 < owners.count(name) < 600 for name in "abcd")


def test_the_owner_is_asked_first_until_it_is_much_busier_than_another() -> None:
    owner, other = ranked("p", ["a", "b"])

    assert chosen("p", {owner: IMBALANCE, other: 0}) == [owner, other]
    assert chosen("p", {owner: IMBALANCE + 1, other: 0}) == [other, owner]
    assert chosen("p", {owner: IMBALANCE + 9, other: 9}) == [owner, other]
    assert chosen("p", {}) == []
