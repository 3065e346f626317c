"""Pins and the reset of the prefix cache through the admin API."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from admin_stage import AdminStage, admin_stage
from openai_server import wait_until

PROMPT = [4 + index % 40 for index in range(40)]
"""What `AdminStage.submit` sends by default: two full blocks of 16."""
WHY = {"reason": "the system prompt of all"}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[AdminStage]:
    with admin_stage(tmp_path) as running:
        yield running


def compute(stage: AdminStage, name: str) -> None:
    stage.submit(name, max_tokens=1)
    wait_until(lambda: stage.engine.num_live_requests == 0, 60)


def test_a_prefix_is_pinned_listed_shown_as_a_metric_and_unpinned(stage: AdminStage) -> None:
    compute(stage, "first")
    with stage.client("operate") as client:
        answer = client.post("/pins", json={**WHY, "token_ids": PROMPT})
        assert answer.status_code == 200
        pin = answer.json()["prefix"]
        assert (pin["num_blocks"], pin["num_tokens"], pin["actor"], pin["reason"]) == (2, 32, "operate", WHY["reason"])
        assert answer.json()["audit"]["outcome"] == "done"
        assert client.get("/pins").json()["pins"] == [pin]
        wait_until(lambda: stage.value("kv_pinned_blocks", tier="device") == 2, 60)

        assert client.post(f"/pins/{pin['pin']}/unpin", json=WHY).json()["prefix"] == pin
        assert client.get("/pins").json()["pins"] == []
        assert client.post(f"/pins/{pin['pin']}/unpin", json=WHY).status_code == 404
        wait_until(lambda: stage.value("kv_pinned_blocks", tier="device") == 0, 60)


def test_the_prompt_of_a_running_request_is_pinned_by_its_name(stage: AdminStage) -> None:
    stage.submit("runs")
    stage.wait_running(1)
    with stage.client("operate") as client:
        wait_until(lambda: client.post("/pins", json={**WHY, "request": "runs"}).status_code == 200, 60)
        assert client.get("/pins").json()["pins"][0]["num_blocks"] == 2


def test_what_cannot_be_pinned_is_refused_and_nothing_changes(stage: AdminStage) -> None:
    compute(stage, "first")
    with stage.client("operate") as client:
        refused: list[tuple[dict[str, object], str]] = [
            ({"token_ids": PROMPT[:5]}, "fills no block of 16"),
            ({"token_ids": PROMPT[::-1]}, "0 of the 2 full blocks"),
            ({"token_ids": PROMPT, "tenant": "blue"}, "0 of the 2 full blocks"),
            ({"request": "gone"}, "no request 'gone' is live"),
            ({}, "exactly one of"),
        ]
        for body, said in refused:
            answer = client.post("/pins", json={**WHY, **body})
            assert answer.status_code == 409
            assert said in answer.json()["detail"]
        assert client.get("/pins").json()["pins"] == []


def test_a_reset_says_what_it_did_and_asks_before_it_ends_pins(stage: AdminStage) -> None:
    compute(stage, "first")
    with stage.client("operate") as client:
        assert client.post("/pins", json={**WHY, "token_ids": PROMPT}).status_code == 200
        refused = client.post("/prefix-cache/reset", json=WHY)
        assert refused.status_code == 409
        assert "would be lost" in refused.json()["detail"]
        answer = client.post("/prefix-cache/reset", json={**WHY, "unpin": True, "wait_seconds": 5}).json()
        assert answer["reset"] == {
            "num_cleared": {"device": 2}, "num_unpinned": 1, "num_in_use": 0, "is_complete": True,
        }  # fmt: skip
        assert client.get("/pins").json()["pins"] == []


def test_whoever_may_only_read_pins_and_resets_nothing(stage: AdminStage) -> None:
    compute(stage, "first")
    with stage.client("read") as client:
        assert client.get("/pins").status_code == 200
        assert client.post("/pins", json={**WHY, "token_ids": PROMPT}).status_code == 403
        assert client.post("/prefix-cache/reset", json=WHY).status_code == 403
