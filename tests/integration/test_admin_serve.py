"""The admin API of `kvwatch serve` as its users run it."""

from pathlib import Path

import httpx
import pytest
from admin_stage import TOKEN_FILE, TOKENS
from lora_adapters import make_adapter
from openai_server import wait_until
from server_process import serve_process
from tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


def test_a_server_is_looked_into_and_changed(folder: Path, tmp_path: Path) -> None:
    tokens, config, audit = tmp_path / "tokens", tmp_path / "kvwatch.toml", tmp_path / "audit"
    tokens.write_text(TOKEN_FILE, encoding="utf-8")
    config.write_text("max_num_seqs = 16\n", encoding="utf-8")
    flags = [
        "--num-blocks", "200", "--config", str(config), "--admin-token-file", str(tokens), "--admin-persist",
        "--admin-audit-file", str(audit), "--flight-dir", str(tmp_path / "flight"),
        "--allow-rebuild",
    ]  # fmt: skip
    with serve_process(folder, *flags) as server:
        ready = next(line for line in server.lines if line.get("event") == "ready")
        headers = {"Authorization": f"Bearer {TOKENS['operate']}"}
        with httpx.Client(base_url=str(ready["admin"]), headers=headers, timeout=60, trust_env=False) as client:
            settings = {each["key"]: each for each in client.get("/config").json()["settings"]}
            assert (settings["num_blocks"]["value"], settings["num_blocks"]["source"]) == (200, "flag")
            assert (settings["max_num_seqs"]["value"], settings["max_num_seqs"]["source"]) == (16, f"file {config}")
            assert settings["port"]["change"] is None
            assert settings["log_level"]["value"] == "info"

            def change(key: str, value: object, *, persist: bool = False) -> httpx.Response:
                body = {"changes": {key: value}, "reason": "test", "persist": persist}
                tag = client.get("/config").headers["etag"]
                return client.patch("/config", json=body, headers={"If-Match": tag})

            assert change("log_level", "error").status_code == 200
            assert change("max_num_seqs", 8, persist=True).status_code == 200
            assert config.read_text(encoding="utf-8") == "max_num_seqs = 8\n"
            assert change("num_blocks", 150, persist=True).status_code == 409
            assert change("num_blocks", 150).status_code == 200
            assert client.get("/pool").json()["tiers"][0]["capacity"] in {149, 199}
            wait_until(lambda: client.get("/pool").json()["tiers"][0]["capacity"] == 149, 60)
            preview = client.patch(
                "/config?dry_run=true",
                json={"changes": {"block_size": 32}, "reason": "test"},
                headers={"If-Match": client.get("/config").headers["etag"]},
            ).json()["preview"]
            assert preview["is_possible"]
            assert preview["is_rebuild"]
            assert change("block_size", 32).status_code == 200
            wait_until(lambda: client.get("/pool").json()["block_size_tokens"] == 32, 60)
            assert client.post("/flight/dump", json={"reason": "look"}).json()["file"].endswith(".kvrec")
            assert [each["engine"] for each in client.get("/diagnosis").json()["engines"]] == ["kvwatch"]
        assert server.terminate() == 0
        lines = server.drain_log()
    told = [line for line in lines if line.get("event") == "audit"]
    assert {str(line["action"]) for line in told} == {"config", "flight.dump"}
    assert all(TOKENS["operate"] not in str(line) for line in lines)
    (ended,) = (line for line in lines if "live values end" in str(line.get("event", "")))
    assert isinstance(ended["live"], dict)
    assert ended["live"]["log_level"] == "error"
    assert ended["live"]["block_size"] == 32
    assert len(audit.read_text(encoding="utf-8").splitlines()) == len(told)


def test_adapters_are_loaded_and_unloaded(folder: Path, tmp_path: Path) -> None:
    tokens, adapters = tmp_path / "tokens", tmp_path / "adapters"
    tokens.write_text(TOKEN_FILE, encoding="utf-8")
    adapters.mkdir()
    make_adapter(folder, adapters / "one", seed=1)
    with serve_process(folder, "--lora-dir", str(adapters), "--admin-token-file", str(tokens)) as server:
        ready = next(line for line in server.lines if line.get("event") == "ready")
        headers = {"Authorization": f"Bearer {TOKENS['operate']}"}
        with httpx.Client(base_url=str(ready["admin"]), headers=headers, timeout=60, trust_env=False) as client:
            assert client.get("/adapters").json() == {"adapters": []}

            loaded = client.post("/adapters", json={"reason": "try", "name": "team/first", "path": "one"})
            again = client.post("/adapters", json={"reason": "try", "name": "team/first", "path": "one"})
            outside = client.post("/adapters", json={"reason": "try", "name": "other", "path": "../tokens"})

            assert loaded.status_code == 200, loaded.text
            assert loaded.json()["adapter"]["num_bytes"] > 0
            assert [again.status_code, outside.status_code] == [409, 409]
            assert client.get("/adapters").json()["adapters"] == [loaded.json()["adapter"]]
            with server.openai() as openai:
                assert "team/first" in {model.id for model in openai.models.list().data}
            assert client.post("/adapters/team%2Ffirst/unload", json={"reason": "done"}).status_code == 200
            assert client.post("/adapters/team%2Ffirst/unload", json={"reason": "done"}).status_code == 404
            subjects = [entry["subject"] for entry in client.get("/audit").json()["entries"]]
            assert subjects == ["team/first", "other from ../tokens", "team/first from one", "team/first from one"]
            outcomes = [entry["outcome"] for entry in client.get("/audit").json()["entries"]]
            assert outcomes == ["done", "refused", "refused", "done"]
