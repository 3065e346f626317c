"""Changes through the admin API: decided on what was read, recorded, in force at once, and over when their time is."""

import contextlib
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from admin_stage import TOKENS, AdminStage, admin_stage
from openai_server import wait_until

from kvwatch import http_protocol
from kvwatch.admin import app
from kvwatch.admin.audit import AuditEntry, AuditTrail
from kvwatch.admin.declared_file import DeclaredFile, changed_text
from kvwatch.admin.engines import AdminEngine, DeclaredSetting
from kvwatch.admin.live_config import config_answer
from kvwatch.admin.problems import Problem
from kvwatch.control import SettingsState
from kvwatch.errors import ConfigError
from kvwatch.logs import LogOutput
from kvwatch.telemetry.clock import SystemClock
from kvwatch_engine.live.changer import RebuildLimits


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[AdminStage]:
    with admin_stage(tmp_path, options={"audit_file": str(tmp_path / "audit")}) as running:
        yield running


def change(client: httpx.Client, query: str = "", etag: str | None = None, **body: Any) -> httpx.Response:
    """Change settings as they are now, or as they were under an ETag."""
    tag = client.get("/config").headers["etag"] if etag is None else etag
    return client.patch(f"/config{query}", json={"reason": "to see", **body}, headers={"If-Match": tag})


def setting(client: httpx.Client, key: str) -> dict[str, Any]:
    """Return one setting as the API shows it."""
    found: dict[str, Any] = next(each for each in client.get("/config").json()["settings"] if each["key"] == key)
    return found


def test_a_change_is_in_force_recorded_and_told(
    stage: AdminStage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with stage.client("operate") as client:
        answer = change(client, changes={"num_blocks": 301, "watermark": "0.05"}, reason="room for others").json()

        assert stage.engine.snapshot().tiers[0].num_blocks == 301
        assert [(each["key"], each["old"], each["new"]) for each in answer["outcome"]["changes"]] == [
            ("num_blocks", 401, 301), ("watermark", "0", "0.05"),
        ]  # fmt: skip
        entry = client.get(f"/audit/{answer['audit']['id']}").json()
        assert entry == answer["audit"]
        assert (entry["actor"], entry["address"], entry["reason"]) == ("operate", "127.0.0.1", "room for others")
        assert entry["outcome"] == "done"
        begun, done = (json.loads(line) for line in (tmp_path / "audit").read_text().splitlines())
        assert (begun["outcome"], done["outcome"]) == ("begun", "done")
        assert done == entry
        assert setting(client, "num_blocks")["value"] == 301
        assert setting(client, "num_blocks")["declared"] == 401
        diff = client.get("/config/diff").json()
        assert diff["toml"] == 'num_blocks = 301\nwatermark = "0.05"\n'
        assert diff["helm_values"] == 'settings:\n  num_blocks: 301\n  watermark: "0.05"\n'
    lines = [record.getMessage() for record in caplog.records if record.name == "kvwatch.audit"]
    assert len(lines) == 2
    assert all("room for others" in line for line in lines)


def test_of_two_changes_at_once_one_wins(stage: AdminStage) -> None:
    with stage.client("operate") as one, stage.client("other") as other:
        tag = one.get("/config").headers["etag"]
        barrier = threading.Barrier(2)
        found: list[int] = []

        def ask(client: httpx.Client, watermark: str) -> None:
            barrier.wait()
            found.append(change(client, etag=tag, changes={"watermark": watermark}).status_code)

        threads = [threading.Thread(target=ask, args=pair) for pair in ((one, "7"), (other, "9"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert sorted(found) == [200, 412]
        assert len(one.get("/audit").json()["entries"]) == 1


def test_a_change_that_expires_reverts_and_says_so(stage: AdminStage) -> None:
    with stage.client("operate") as client:
        answer = change(client, changes={"max_num_seqs": 4}, expires_in=6).json()
        assert answer["audit"]["expires_at"] == setting(client, "max_num_seqs")["expires_at"]
        wait_until(lambda: stage.value("config_drift", key="max_num_seqs") == 1, 60)

        wait_until(lambda: setting(client, "max_num_seqs")["value"] == 8, 60)

        wait_until(lambda: stage.value("config_drift", key="max_num_seqs") == 0, 60)
        newest = client.get("/audit").json()["entries"][0]
        assert (newest["actor"], newest["reverts"]) == ("kvwatch", answer["audit"]["id"])
        assert str(answer["audit"]["id"]) in newest["reason"]
        assert setting(client, "max_num_seqs")["expires_at"] is None


def test_a_later_change_has_its_own_time(stage: AdminStage) -> None:
    with stage.client("operate") as client:
        change(client, changes={"max_num_seqs": 4}, expires_in=1)
        change(client, changes={"max_num_seqs": 5}, expires_in=3600)

        wait_until(lambda: client.get("/audit").json()["entries"][0]["outcome"] == "done", 60)
        threading.Event().wait(2)

        assert setting(client, "max_num_seqs")["value"] == 5


def test_a_value_that_cannot_be_reverted_holds_up_no_other(tmp_path: Path) -> None:
    """All expired values had to be possible at once, or all of them stayed, and so did what expired after them."""
    with admin_stage(tmp_path, num_blocks=101) as stage, stage.client("operate") as client:
        change(client, changes={"num_blocks": 401, "max_num_seqs": 40, "max_batch_tokens": 50}, expires_in=3600)
        stage.model.on_step = lambda _: time.sleep(0.05)
        stage.submit("long")  # it may need 128 blocks
        stage.wait_running(1)

        answer = change(client, changes={"num_blocks": 402, "max_num_seqs": 41, "max_batch_tokens": 52}, expires_in=1)
        assert answer.status_code == 200, answer.text
        wait_until(lambda: setting(client, "max_num_seqs")["value"] == 8, 60)
        change(client, changes={"victim_policy": "least-computed"}, expires_in=1)
        wait_until(lambda: setting(client, "victim_policy")["value"] == "newest", 60)

        assert setting(client, "max_batch_tokens")["value"] == setting(client, "max_batch_tokens")["declared"]
        assert setting(client, "num_blocks")["value"] == 402
        assert setting(client, "num_blocks")["expires_at"] is not None
        assert {each["outcome"] for each in client.get("/audit").json()["entries"]} == {"done", "refused"}
        assert client.post("/requests/long/abort", json={"reason": "it is in the way"}).status_code == 200
        wait_until(lambda: setting(client, "num_blocks")["value"] == 101, 120)


def test_what_another_block_size_brings_with_it_ends_too(tmp_path: Path) -> None:
    """The number of blocks would have stayed what nobody declared and nobody asked for, without an end."""
    with (
        admin_stage(tmp_path, rebuilds=RebuildLimits(cooldown_seconds=0)) as stage,
        stage.client("operate") as client,
    ):
        change(client, changes={"block_size": 8}, expires_in=5)
        brought = setting(client, "num_blocks")
        change(client, changes={"num_blocks": 501}, expires_in=1)

        wait_until(lambda: setting(client, "block_size")["value"] == 16, 60)
        wait_until(lambda: setting(client, "num_blocks")["value"] == 401, 60)

        assert brought["value"] == 801
        assert brought["expires_at"] is not None
        assert client.get("/config/diff").json()["differences"] == []
        assert setting(client, "num_blocks")["expires_at"] is None


def test_what_a_change_brings_with_it_ends_when_the_change_does(tmp_path: Path) -> None:
    with (
        admin_stage(tmp_path, rebuilds=RebuildLimits(cooldown_seconds=0)) as stage,
        stage.client("operate") as client,
    ):
        change(client, changes={"block_size": 8}, expires_in=60)
        change(client, changes={"block_size": 4}, expires_in=3600)
        assert setting(client, "num_blocks")["expires_at"] == setting(client, "block_size")["expires_at"]

        change(client, changes={"num_blocks": 1201}, expires_in=1800)
        asked = setting(client, "num_blocks")["expires_at"]
        change(client, changes={"block_size": 8}, expires_in=3600)

        assert setting(client, "num_blocks")["value"] == 601
        assert setting(client, "num_blocks")["expires_at"] == asked, "who asked for a number said how long"


def test_a_change_has_an_end_also_if_the_engine_is_busy_right_after_it(tmp_path: Path) -> None:
    with admin_stage(tmp_path) as stage, stage.client("operate") as client:
        released = threading.Event()
        stage.submit("long")
        stage.wait_running(1)

        def hold(_step: object) -> None:
            if stage.engine.settings.max_num_seqs == 4:
                released.wait(60)

        stage.model.on_step = hold
        answer = change(client, changes={"max_num_seqs": 4}, expires_in=3600)
        released.set()

        assert answer.status_code == 200, answer.text
        assert answer.json()["audit"]["outcome"] == "done"
        assert setting(client, "max_num_seqs")["expires_at"] == answer.json()["audit"]["expires_at"] is not None


def test_a_body_that_does_not_come_keeps_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(http_protocol, "EXCHANGE_SECONDS", 1.0)
    monkeypatch.setattr(http_protocol, "LOOK_SECONDS", 0.1)
    with admin_stage(tmp_path) as stage, socket.create_connection(("127.0.0.1", stage.port), timeout=60) as slow:
        slow.sendall(
            b"PATCH /admin/v1/config HTTP/1.1\r\nHost: localhost\r\nIf-Match: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\nAuthorization: Bearer " + TOKENS["operate"].encode() + b'\r\n\r\n{"changes'
        )

        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := slow.recv(65536):
                received += piece

        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"urn:kvwatch:problem:slow-body" in received


def test_settings_of_another_run_are_out_of_date_however_alike_they_are(stage: AdminStage) -> None:
    """A clock that was set back could give two runs the same version."""
    state = SettingsState(7, [], is_rebuild_allowed=False)
    engine = AdminEngine(labels={}, log=stage.log, view=lambda: stage.observatory.view, control=stage.engine)

    answers = [config_answer(each, state, {}) for each in (engine, engine, replace(engine, epoch="earlier"))]

    tags = [app.etag(msgspec.json.encode(answer)) for answer in answers]
    assert tags[0] == tags[1] != tags[2]


def test_the_metrics_say_how_long_a_sequence_the_pool_lets_be(stage: AdminStage) -> None:
    with stage.client("operate") as client:
        wait_until(lambda: stage.value("config_value", key="max_model_len") == 4000, 60)

        change(client, changes={"num_blocks": 101})

        wait_until(lambda: stage.value("config_value", key="max_model_len") == 1600, 60)
        assert stage.engine.max_model_len == 1600


def test_a_dry_run_says_what_would_happen_and_changes_nothing(stage: AdminStage) -> None:
    with stage.client("operate") as client:
        answer = change(client, "?dry_run=true", changes={"num_blocks": 301}).json()

        assert answer["is_dry_run"]
        assert answer["preview"]["is_possible"]
        assert [each["key"] for each in answer["preview"]["changes"]] == ["num_blocks"]
        assert setting(client, "num_blocks")["value"] == 401
        assert client.get("/audit").json()["entries"] == []


def test_a_change_is_taken_back(stage: AdminStage) -> None:
    with stage.client("operate") as client:
        first = change(client, changes={"watermark": "7"}).json()["audit"]["id"]

        answer = client.post(f"/audit/{first}/revert", json={"reason": "enough"})
        again = client.post(f"/audit/{first}/revert", json={"reason": "enough"})

        assert answer.status_code == 200
        assert answer.json()["audit"]["reverts"] == first
        assert setting(client, "watermark")["value"] == "0"
        assert setting(client, "watermark")["expires_at"] is None, "what is declared does not expire"
        assert again.status_code == 409
        assert client.post("/audit/1/revert", json={"reason": "enough"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"changes": {"num_block": 5}}, 422),
        ({"changes": {"num_blocks": "5"}}, 422),
        ({"changes": {"num_blocks": 1}}, 422),
        ({"changes": {"num_blocks": None}}, 422),
        ({"changes": {}}, 422),
        ({"changes": {"watermark": "much"}}, 409),
        ({"changes": {"max_num_seqs": 4000}}, 409),
        ({"changes": {"block_size": 8}}, 409),
        ({"changes": {"num_blocks": 3000}}, 409),
        ({"changes": {"watermark": "3"}, "reason": ""}, 422),
        ({"changes": {"watermark": "3"}, "reason": "   "}, 422),
        ({"changes": {"watermark": "3"}, "reason": "\u001e\u3000"}, 422),
        ({"changes": {"watermark": "3"}, "expires_in": 0}, 422),
        ({"changes": {"watermark": "3"}, "expires_in": None}, 422),
        ({"changes": {"watermark": "3"}, "more": 1}, 422),
        ({"changes": {"watermark": "3"}, "persist": True}, 409),
    ],
)  # fmt: skip
def test_what_is_refused_leaves_everything_as_it_was(stage: AdminStage, body: dict[str, Any], status: int) -> None:
    with stage.client("operate") as client:
        before = client.get("/config").content

        answer = change(client, **body)

        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert client.get("/config").content == before
        assert {entry["outcome"] for entry in client.get("/audit").json()["entries"]} <= {"refused", "failed"}


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400), (b"\xff", "application/json", 400), (b"[]", "application/json", 422),
        (b"{}", "text/plain", 415), (b"{}", "", 415), (b"[" * 100_000, "application/json", 400),
        (b" " * 300_000, "application/json", 413),
    ],
)  # fmt: skip
def test_a_body_that_is_none_is_refused(stage: AdminStage, content: bytes, kind: str, status: int) -> None:
    with stage.client("operate") as client:
        headers = {"Content-Type": kind, "If-Match": "x"}
        assert client.patch("/config", content=content, headers=headers).status_code == status


def test_a_change_must_say_what_it_was_decided_on(stage: AdminStage) -> None:
    with stage.client("operate") as client:
        body = {"changes": {"watermark": "3"}, "reason": "x"}
        assert client.patch("/config", json=body).status_code == 428
        assert client.patch("/config", json=body, headers={"If-Match": "*"}).status_code == 412
        assert client.patch("/config", json=body, headers={"If-Match": '"old"'}).status_code == 412


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_no_audit_no_change(tmp_path: Path) -> None:
    with admin_stage(tmp_path, options={"audit_file": "/dev/full"}) as stage, stage.client("operate") as client:
        answer = change(client, changes={"watermark": "3"})
        act = client.post("/admission/pause", json={"reason": "x", "seconds": 60})

        assert (answer.status_code, act.status_code) == (503, 503)
        assert setting(client, "watermark")["value"] == "0"
        assert not client.get("/admission").json()["admission"]["is_paused"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_no_line_in_the_log_no_change_where_the_log_is_all_there_is(tmp_path: Path) -> None:
    """What reads the log is gone, or its disk is full; another audit file takes its place."""
    root = logging.getLogger()
    before, root.handlers[:] = root.handlers[:], []
    try:
        with (tmp_path / "audit").open("w", encoding="utf-8") as good:
            for options, status in (({}, 503), ({"audit_file": str(tmp_path / "file")}, 200)):
                with admin_stage(tmp_path, options=options) as stage, stage.client("operate") as client:
                    root.handlers[:] = [LogOutput(good)]
                    assert change(client, changes={"watermark": "3"}).status_code == 200
                    with contextlib.suppress(OSError), open("/dev/full", "w", encoding="utf-8") as full:
                        root.handlers[:] = [LogOutput(full)]
                        answer = change(client, changes={"watermark": "4"})
                        assert answer.status_code == status, answer.text
                    assert setting(client, "watermark")["value"] == ("3" if status == 503 else "4")
                    root.handlers[:] = []
    finally:
        root.handlers[:] = before


class SmallDisk(io.FileIO):
    """A file on a disk that has room for so many bytes more."""

    room = 1 << 20

    def write(self, content: Any, /) -> int:
        taken = super().write(bytes(content)[: self.room])
        self.room -= taken
        return taken


def test_a_line_for_which_there_was_no_space_does_not_swallow_the_next(tmp_path: Path) -> None:
    file = SmallDisk(str(tmp_path / "audit"), "ab")
    trail = AuditTrail(SystemClock(), file)
    entry = AuditEntry(
        id=0, time="", actor="a", address="", engine="chat", dp_rank=0, action="drain", reason="to see"
    )  # fmt: skip
    for room in (20, 0):
        file.room = room
        with pytest.raises(Problem, match="cannot be written"):
            trail.begin(entry)

    file.room = 1 << 20
    written = trail.begin(entry)
    trail.end(written)
    trail.close()

    lines = (tmp_path / "audit").read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in lines[1:]] == [written.id] * 2
    assert len(lines[0]) == 20


def test_changes_have_a_rate(tmp_path: Path) -> None:
    rate = {"changes_per_minute": 1, "changes_at_once": 2}
    with (
        admin_stage(tmp_path, options=rate) as stage,
        stage.client("operate") as client,
        stage.client("other") as other,
    ):
        codes = [client.post("/admission/resume", json={"reason": "x"}) for _ in range(3)]
        assert [code.status_code for code in codes] == [200, 200, 429]
        assert int(codes[-1].headers["retry-after"]) > 0
        assert other.post("/admission/resume", json={"reason": "x"}).status_code == 200
        assert client.get("/pool").status_code == 200


# ---------------------------------------------------------------- the configuration file


def test_a_value_may_be_declared_for_good(tmp_path: Path) -> None:
    path = tmp_path / "kvwatch.toml"
    path.write_text("# ours\nnum-blocks = 401 # as measured\n", encoding="utf-8")
    declared = tuple(
        DeclaredSetting(key=key, value=value, source=source, brief=key)
        for key, value, source in (
            ("num_blocks", "401", f"file {path}"), ("watermark", "0", "default"), ("max_num_seqs", "8", "flag"),
        )
    )  # fmt: skip
    with (
        admin_stage(tmp_path, options={"config_file": str(path)}, declared=declared) as stage,
        stage.client("operate") as client,
    ):
        answer = change(client, changes={"num_blocks": 301, "watermark": "7"}, persist=True)
        refused = change(client, changes={"max_num_seqs": 4}, persist=True)
        taken_back = client.post(
            f"/audit/{answer.json()['audit']['id']}/revert?dry_run=true", json={"reason": "no", "persist": True}
        )

        assert answer.status_code == 200, answer.text
        assert path.read_text(encoding="utf-8") == '# ours\nnum_blocks = 301 # as measured\nwatermark = "7"\n'
        assert answer.json()["audit"]["expires_at"] is None
        assert client.get("/config/diff").json()["differences"] == []
        assert refused.status_code == 409
        assert "flag" in refused.json()["detail"]
        assert taken_back.json()["preview"]["is_possible"]
        assert "301" in path.read_text(encoding="utf-8"), "it was only asked"
        first = answer.json()["audit"]["id"]
        undone = client.post(f"/audit/{first}/revert", json={"reason": "no", "persist": True}).json()
        assert (undone["audit"]["reverts"], undone["audit"]["expires_at"]) == (first, None)
        assert path.read_text(encoding="utf-8") == '# ours\nnum_blocks = 401 # as measured\nwatermark = "0"\n'
        assert client.get("/config/diff").json()["differences"] == []
    assert os.listdir(tmp_path).count("kvwatch.toml") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".kvwatch")]


def test_a_link_to_a_file_stays_one_and_what_it_leads_to_is_changed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "kvwatch.toml", tmp_path / "kvwatch.toml"
    real.write_text("max_num_seqs = 8\n", encoding="utf-8")
    link.symlink_to(real)

    DeclaredFile(str(link)).prepare({"max_num_seqs": 4}).commit()

    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == "max_num_seqs = 4\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", "a = 1\n"),
        ("a = 2", "a = 1\n"),
        ("b = 3", "b = 3\na = 1\n"),
        ("a = 2 # why\n[lora]\na = 5\n", "a = 1 # why\n[lora]\na = 5\n"),
        ("[lora]\na = 5\n", "a = 1\n[lora]\na = 5\n"),
        ("# a = 2\n'a' = 3\n", "# a = 2\na = 1\n"),
    ],
)
def test_only_the_line_of_a_setting_changes(old: str, new: str) -> None:
    assert changed_text(old, {"a": 1}) == new


@pytest.mark.parametrize("old", ["a = '''\nb = 2\n'''\nb = 3\n", "a = [\n 1,\n]\n", "not toml"])
def test_a_file_that_cannot_be_changed_by_line_is_left_alone(old: str) -> None:
    with pytest.raises(ConfigError, match="by hand"):
        changed_text(old, {"a": 1, "b": 1})


# ---------------------------------------------------------------- acts


def test_admission_pauses_for_a_time_and_goes_on(stage: AdminStage) -> None:
    with stage.client("operate") as client:
        paused = client.post("/admission/pause", json={"reason": "maintenance", "seconds": 600}).json()
        assert paused["admission"]["is_paused"]
        stage.submit("late", max_tokens=5)
        wait_until(lambda: stage.value("waiting_requests", reason="paused") == 1, 60)
        (request,) = client.get("/requests?state=waiting").json()["requests"]
        assert (request["request"], request["wait_reason"]) == ("late", "paused")

        resumed = client.post("/admission/resume", json={"reason": "done"}).json()

        assert not resumed["admission"]["is_paused"]
        wait_until(lambda: stage.engine.num_live_requests == 0, 60)
        actions = [entry["action"] for entry in client.get("/audit").json()["entries"]]
        assert actions == ["admission.resume", "admission.pause"]


@pytest.mark.parametrize("request_id", ["long one", "team/long", "/", "../pool"])
def test_a_request_is_ended_whatever_its_name(stage: AdminStage, request_id: str) -> None:
    stage.submit(request_id)
    stage.wait_running(1)
    path = f"/requests/{quote(request_id, safe='')}"
    with stage.client("operate") as client:
        shown = client.get(path).json()
        assert (shown["request"], shown["num_blocks"] >= 3) == (request_id, True)

        answer = client.post(f"{path}/abort", json={"reason": "too long"})
        again = client.post(f"{path}/abort", json={"reason": "too long"})

    assert (answer.status_code, again.status_code) == (200, 404)
    assert stage.engine.num_live_requests == 0


def test_a_drain_begins(stage: AdminStage) -> None:
    with stage.client("operate") as client:
        assert client.post("/drain", json={"reason": "update"}).status_code == 200
        assert not client.get("/engines").json()["engines"][0]["is_ready"]


def test_blocks_and_prefixes_are_shown_in_pages(stage: AdminStage) -> None:
    stage.submit("a", num_prompt_tokens=200, max_tokens=1)
    wait_until(lambda: stage.engine.num_live_requests == 0, 60)
    with stage.client() as client:
        cached = client.get("/blocks?state=cached&limit=5").json()
        rest = client.get(f"/blocks?state=cached&cursor={cached['next_cursor']}").json()
        first = cached["blocks"][0]["hash"]
        (found,) = client.get(f"/blocks?hash={first[:20]}").json()["blocks"]
        prefixes = client.get("/prefixes?by=tokens").json()

    assert len(cached["blocks"]) == 5
    assert len(cached["blocks"]) + len(rest["blocks"]) == 12
    assert found["hash"] == first
    assert prefixes["prefixes"][0]["num_blocks"] == 12


def test_what_is_not_there_is_said_plainly(stage: AdminStage) -> None:
    with stage.client("operate") as client:
        answer = client.post("/flight/dump", json={"reason": "x"})
        assert answer.status_code == 409
        assert "here" in answer.json()["detail"]
        assert client.get("/diagnosis").json() == {"engines": []}
