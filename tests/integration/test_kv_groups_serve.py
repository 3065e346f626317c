"""`kvwatch serve` with models whose layers see windows: usage of each KV group, and what is refused by name."""

import json
from pathlib import Path

import httpx
import pytest
from server_process import serve_process
from tiny_models import make_tiny_model

from kvwatch.errors import ConfigError
from kvwatch_engine.contracts.cache import KVGroup
from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.contracts.model import ModelInfo, SamplingDefaults
from kvwatch_engine.memory.tiers.tiers import TierSettings
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.serve.tiers import served_groups

SMALL = ("--served-model-name", "tiny", "--num-blocks", "400", "--block-size", "8", "--dtype", "float32")


def model_with(*windows: int | None) -> ModelInfo:
    return ModelInfo(
        name="tiny", folder=Path(), architecture="Gemma3ForCausalLM", num_layers=len(windows), num_heads=1,
        num_kv_heads=1, head_dim=8, hidden_size=8, vocab_size=10, max_position=64, eos_token_ids=(),
        sampling_defaults=SamplingDefaults(), dtype="float32", dtype_reason="", weights_fingerprint="",
        weights_bytes=0, groups=tuple(KVGroup((layer,), window) for layer, window in enumerate(windows)),
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_usage_is_reported_for_each_group(tmp_path: Path) -> None:
    folder = make_tiny_model("gemma3", tmp_path / "model", sliding_window=16)

    with serve_process(folder, *SMALL) as server:
        body = {"model": "tiny", "prompt": list(range(5, 125)), "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{server.api}/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        metrics = server.metrics()
        used = [metrics[f'kvwatch_kv_blocks{{group="{n}",state="used",tier="device"}}'] for n in range(3)]
        cached = [metrics[f'kvwatch_kv_blocks{{group="{n}",state="cached",tier="device"}}'] for n in range(3)]
        empty = metrics['kvwatch_kv_blocks{group="",state="empty",tier="device"}']

        assert used == [0, 0, 0]
        assert cached == [(120 + 99) // 8] * 3, "what left the window is cached until its room is needed"
        assert metrics['kvwatch_kv_block_capacity{tier="device"}'] == 399 == empty + sum(used) + sum(cached)
        assert metrics['kvwatch_kv_block_releases_total{reason="window",tier="device"}'] == 2 * ((219 - 16 + 1) // 8)
        assert metrics["kvwatch_ledger_violations_total"] == 0
        assert server.terminate() == 0


def test_tiers_are_refused_for_models_with_several_groups_and_take_one_window_for_none() -> None:
    tiers = TierSettings(host_bytes=1 << 20)

    with pytest.raises(ConfigError, match="has 2 KV groups, but --host-memory and --disk-dir serve models with one"):
        served_groups(tiers, model_with(None, 8))

    assert [group.window for group in served_groups(tiers, model_with(8))] == [None]
    assert [group.window for group in served_groups(TierSettings(), model_with(None, 8))] == [None, 8]


@pytest.mark.parametrize("model_type", ["bamba", "jamba", "mamba2"])
def test_state_space_models_are_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    config = {"model_type": model_type, "architectures": [f"{model_type.title()}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match="some of its layers keep a recurrent state, which is no sequence of keys"):
        load_model(str(tmp_path))
