"""A sidecar's admin API: what it knows it tells itself, what its kvwatch engine has to do it passes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from admin_stage import TOKENS, AdminStage, admin_stage
from foreign_stage import ForeignEngine
from openai_server import wait_until
from sidecar_stage import SidecarStage, sidecar_stage
from stream_stage import stream_stage

from kvwatch.sources.engines import EngineSpec, make_source
from kvwatch.sources.source import Source
from kvwatch.stream.access import StreamOptions


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[AdminStage]:
    with admin_stage(tmp_path) as running:
        yield running


def beside(engine: AdminStage, folder: Path, *further: str, may_change: bool = True, **more: Any) -> Any:
    """Run a sidecar beside an engine, with the engine's tokens for its own callers."""
    (folder / "for_engine").write_text(TOKENS["other"] + "\n", encoding="utf-8")
    option = f"?admin_token_file={folder / 'for_engine'}" if may_change else ""
    return sidecar_stage(
        f"chat=grpc://{engine.grpc}{option}", *further, admin_token_file=str(folder / "tokens"),
        admin_audit_file=str(folder / "sidecar-audit"), **more,
    )  # fmt: skip


def client(stage: SidecarStage, token: str | None = "operate") -> httpx.Client:
    """Return a client of the sidecar's admin API."""
    admin = stage.sidecar.admin
    assert admin is not None
    assert admin.address is not None
    headers = {} if token is None else {"Authorization": f"Bearer {TOKENS[token]}"}
    url = f"http://127.0.0.1:{admin.address[1]}/admin/v1"
    return httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)


def test_an_engine_is_looked_into_and_changed_through_its_sidecar(engine: AdminStage, tmp_path: Path) -> None:
    engine.submit("a")
    with beside(engine, tmp_path) as stage, client(stage) as near:
        stage.wait_until_watched(1)
        wait_until(lambda: near.get("/pool").json()["tiers"][0]["used"] > 0, 60)
        assert near.get("/pool").json()["tiers"][0]["capacity"] == 400
        assert near.get("/engines").json()["engines"][0]["can_change"]
        assert near.get("/requests/a?engine=chat").json()["state"] == "running"
        config = near.get("/config")
        body = {"changes": {"num_blocks": 301}, "reason": "from afar"}

        done = near.patch("/config?engine=chat&dp_rank=0", json=body, headers={"If-Match": config.headers["etag"]})
        stale = near.patch("/config", json=body, headers={"If-Match": config.headers["etag"]})

        assert (done.status_code, stale.status_code) == (200, 412)
        assert engine.engine.snapshot().tiers[0].num_blocks == 301
        theirs = done.json()["audit"]
        assert theirs["actor"] == "other", "the engine knows the sidecar's token"
        assert "for operate at 127.0.0.1" in theirs["address"], "and for whom it asked"
        newest, first = near.get("/audit").json()["entries"]
        assert (first["action"], first["actor"], first["outcome"]) == ("forward", "operate", "done")
        assert newest["outcome"] == "refused"
        assert len((tmp_path / "sidecar-audit").read_text().splitlines()) == 4
        assert near.post(f"/audit/{theirs['id']}/revert?engine=chat", json={"reason": "back"}).status_code == 200
        wait_until(lambda: near.get("/pool").json()["tiers"][0]["capacity"] == 400, 60)


def test_the_diagnosis_names_engines_that_were_never_reached(engine: AdminStage, tmp_path: Path) -> None:
    with beside(engine, tmp_path, "lost=vllm+http://127.0.0.1:9") as stage, client(stage) as near:
        stage.wait_until_watched(1)
        told = {each["engine"]: each for each in near.get("/diagnosis").json()["engines"]}
        (lost,) = near.get("/diagnosis?engine=lost").json()["engines"]

        assert told.keys() == {"chat", "lost"}
        assert lost["diagnosis"]["findings"][0]["rule"] == "source_incomplete"
        assert [each["engine"] for each in near.get("/diagnosis?engine=chat&dp_rank=0").json()["engines"]] == ["chat"]
        assert near.get("/diagnosis?engine=other").status_code == 404


def test_the_list_of_engines_says_who_was_never_reached_who_is_and_who_was_lost() -> None:
    with stream_stage() as gone:
        address = gone.address
    with sidecar_stage(f"chat=grpc://{address}", "far=vllm+http://127.0.0.1:9") as stage, client(stage, None) as near:

        def told(name: str) -> dict[str, Any]:
            (found,) = [each for each in near.get("/engines").json()["engines"] if each["engine"] == name]
            return dict(found)

        never = told("chat")
        assert (never["state"], never["is_up"], never["can_change"]) == ("never_reached", False, False)
        assert (never["is_alive"], never["is_ready"]) == (None, None)
        early = near.get("/pool?engine=chat")
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        assert "engine chat was not reached yet" in early.json()["detail"]
        unknown = near.get("/pool?engine=other")
        assert unknown.status_code == 404
        assert "chat (not reached yet), far (not reached yet)" in unknown.json()["detail"]

        with stream_stage(options=StreamOptions(listen=address)):
            wait_until(lambda: told("chat")["state"] == "reached", 60)
            reached = told("chat")
            assert reached["is_alive"]
            assert near.get("/pool?engine=chat").status_code == 200
            unnamed = near.get("/pool")
            assert unnamed.status_code == 409, "whom a change means must not depend on who was reached first"
            assert "far (not reached yet)" in unnamed.json()["detail"]
        wait_until(lambda: told("chat")["state"] == "lost", 60)
        lost = told("chat")

        assert (lost["is_up"], lost["is_alive"]) == (False, None)
        assert never["since"] < reached["since"] < lost["since"]
        assert told("far") == never | {"engine": "far"}
        assert near.get("/pool?engine=far").status_code == 503


def test_who_may_do_what_is_decided_by_the_sidecar_too(engine: AdminStage, tmp_path: Path) -> None:
    with beside(engine, tmp_path) as stage:
        stage.wait_until_watched(1)
        for token, status in ((None, 401), ("read", 403), ("expired", 401), ("operate", 200)):
            with client(stage, token) as near:
                assert near.post("/admission/resume", json={"reason": "x"}).status_code == status
                assert near.get("/config").status_code == (401 if token == "expired" else 200)


def test_a_sidecar_without_a_token_for_its_engine_says_so(engine: AdminStage, tmp_path: Path) -> None:
    with beside(engine, tmp_path, may_change=False) as stage, client(stage) as near:
        stage.wait_until_watched(1)
        answer = near.get("/config")
        assert answer.status_code == 409
        assert "admin_token_file" in answer.json()["detail"]
        assert near.get("/pool").status_code == 200


@pytest.mark.parametrize(("token", "words"), [("wrong-token-0123456789", "does not know"), (TOKENS["read"], "lacks")])
def test_a_token_that_does_not_do_is_said(engine: AdminStage, tmp_path: Path, token: str, words: str) -> None:
    with beside(engine, tmp_path) as stage, client(stage) as near:
        stage.wait_until_watched(1)
        (tmp_path / "for_engine").write_text(token + "\n", encoding="utf-8")
        answer = near.post("/admission/resume", json={"reason": "x"})
        assert answer.status_code == 503
        assert words in answer.json()["detail"]
        assert near.get("/audit").json()["entries"][0]["outcome"] == "failed"


def test_an_engine_of_another_project_is_told_apart(engine: AdminStage, tmp_path: Path) -> None:
    foreign = ForeignEngine("vllm")

    def make(spec: EngineSpec) -> Source:
        return foreign if spec.name == "vllm" else make_source(spec)

    with beside(engine, tmp_path, "vllm=vllm+http://127.0.0.1:9", make=make) as stage, client(stage) as near:
        stage.wait_until_watched(2)
        assert near.get("/pool").status_code == 409, "which of them is meant must be said"
        assert near.get("/pool?engine=vllm").json()["tiers"] == []
        answer = near.post("/drain?engine=vllm", json={"reason": "x"})
        assert answer.status_code == 409
        assert "kvwatch's own engine can" in json.loads(answer.content)["detail"]
        assert {each["engine"]: each["can_change"] for each in near.get("/engines").json()["engines"]} == {
            "chat": True, "vllm": False,
        }  # fmt: skip
