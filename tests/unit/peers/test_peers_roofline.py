import json
from pathlib import Path

import pytest
import torch
from peers.loads import Load
from peers.roofline import Machine, Meter, ModelSize, decode_step_seconds, least_times, model_size
from safetensors.torch import save_file

SIZE = ModelSize(
    weight_bytes=1000, layer_weights=400, logit_weights=100, kv_bytes_per_token=10, attention_operations=8
)  # fmt: skip


def test_a_decode_step_reads_the_weights_once_and_each_context() -> None:
    slow_memory = Machine(bandwidth=100.0, peak=1e12)

    assert decode_step_seconds(SIZE, slow_memory, batch=4, context=25) == pytest.approx((1000 + 4 * 25 * 10) / 100)


def test_a_decode_step_on_fast_memory_is_bound_by_its_products() -> None:
    slow_products = Machine(bandwidth=1e12, peak=50.0)

    assert decode_step_seconds(SIZE, slow_products, batch=4, context=25) == pytest.approx(4 * (2 * 500 + 25 * 8) / 50)


def test_a_load_is_its_prompts_and_one_step_less_than_it_has_answers_tokens() -> None:
    load = Load("one", num_prompt_tokens=2, num_output_tokens=3, concurrency=1, num_requests=1)

    memory_only = least_times(load, SIZE, Machine(bandwidth=1.0, peak=float("inf")))
    products_only = least_times(load, SIZE, Machine(bandwidth=float("inf"), peak=1.0))

    assert memory_only.prefill == 1000
    assert memory_only.decode == (1000 + 3 * 10) + (1000 + 4 * 10)
    assert products_only.prefill == 2 * 400 * 2 + 2 * 100 + (1 + 2) * 8
    assert products_only.decode == (1000 + 3 * 8) + (1000 + 4 * 8)


def test_what_prompts_share_is_computed_once() -> None:
    load = Load("shared", 10, 1, concurrency=2, num_requests=4, num_shared_tokens=8)

    bound = least_times(load, SIZE, Machine(bandwidth=float("inf"), peak=1.0))

    shared_sees, own_sees = sum(range(1, 9)), 9 + 10
    assert bound.prefill == 2 * 400 * (8 + 4 * 2) + 2 * 100 * 4 + (shared_sees + 4 * own_sees) * 8


def test_overlapping_prompts_and_decoding_is_never_slower_than_one_after_the_other() -> None:
    load = Load("both", 64, 16, concurrency=4, num_requests=8)

    for peak in (1e3, 1e5, 1e7):
        bound = least_times(load, SIZE, Machine(bandwidth=1e4, peak=peak))

        assert bound.overlapped <= bound.phases


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_models_size_is_read_from_its_folder(tmp_path: Path, is_tied: bool) -> None:
    config = {
        "vocab_size": 100, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
        "head_dim": 2, "tie_word_embeddings": is_tied,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": torch.zeros(100, 8), "model.layers.0.mlp.weight": torch.zeros(16, 8)}
    if not is_tied:
        tensors["lm_head.weight"] = torch.zeros(100, 8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")

    size = model_size(tmp_path)

    assert size.layer_weights == 16 * 8
    assert size.logit_weights == 100 * 8
    assert size.weight_bytes == 2 * (16 * 8 + 100 * 8)
    assert size.kv_bytes_per_token == 2 * 3 * 2 * 2 * 2
    assert size.attention_operations == 4 * 3 * 4 * 2


def test_the_machine_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.roofline.BUFFER_BYTES", 2**22)
    machine = Meter().measure()

    assert 0 < machine.bandwidth < 1e14
    assert 0 < machine.peak < 1e17
