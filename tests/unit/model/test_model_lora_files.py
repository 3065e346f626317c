"""A bad adapter is refused with the reason, and changes nothing."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lora_adapters import make_adapter
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from kvwatch_engine.contracts.errors import AdapterError
from kvwatch_engine.model.adapters import AdapterStore
from kvwatch_engine.model.loader import load_model
from kvwatch_engine.model.lora_config import parse_config

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stage:
    """A store without adapters, and a folder with a good one."""

    store: AdapterStore
    folder: Path

    def refused(self) -> str:
        """Load what is in the folder; return why it was refused."""
        before = self.store.num_bytes
        with pytest.raises(AdapterError) as raised:
            self.store.load("mine", self.folder)
        assert self.store.num_bytes == before
        assert str(self.folder) not in str(raised.value), "paths of the machine are nobody's business"
        assert str(raised.value).startswith("adapter 'mine' cannot be loaded: ")
        assert len(str(raised.value)) < 1000
        return str(raised.value)

    def configure(self, **values: object) -> None:
        path = self.folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def change(self, how: Callable[[Tensors], object]) -> None:
        tensors = load_file(self.folder / WEIGHTS)
        how(tensors)
        save_file(tensors, self.folder / WEIGHTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def good(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter"), seed=0, r=8)


@pytest.fixture
def stage(model: Path, good: Path, tmp_path: Path) -> Stage:
    store = load_model(str(model), dtype="float32").adapters
    store.max_rank = 16
    return Stage(store, shutil.copytree(good, tmp_path / "adapter"))


def test_a_good_adapter_is_loaded_with_its_rank_and_its_bytes(stage: Stage) -> None:
    first, second = (stage.store.load("mine", stage.folder) for _ in range(2))

    assert (first.name, first.rank) == ("mine", 8)
    assert first.num_bytes == sum(tensor.nbytes for tensor in load_file(stage.folder / WEIGHTS).values())
    assert first.load_id != second.load_id
    assert stage.store.num_bytes == 2 * first.num_bytes
    stage.store.discard(first.load_id)
    stage.store.discard(first.load_id)
    assert stage.store.num_bytes == first.num_bytes


def test_half_precision_is_widened(stage: Stage) -> None:
    stage.change(lambda tensors: tensors.update({name: tensor.half() for name, tensor in tensors.items()}))

    assert stage.store.load("mine", stage.folder).num_bytes > 0


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is not supported: DoRA scales rows of the base model's weights"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported: layers of its own"),
        ({"modules_to_save": ["lm_head"]}, "merge the adapter into the base model, and serve that"),
        ({"lora_bias": True}, "lora_bias is not supported: trained biases"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
        ({"a_method_of_the_future": {"x": 1}}, "a_method_of_the_future is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"init_lora_weights": 1}, "changes the base model's weights"),
        ({"init_lora_weights": ["pissa"]}, "changes the base model's weights"),
        ({"r": 0}, "r is 0; it must be a whole number"),
        ({"r": -8}, "r is -8"),
        ({"r": True}, "r is True"),
        ({"r": "8"}, "r is '8'"),
        ({"r": 8.0}, "r is 8.0"),
        ({"r": 10**30}, "r is 1000000"),
        ({"r": 17}, "rank is 17, but the limit is 16"),
        ({"rank_pattern": {"q_proj": 99}}, "rank is 99, but the limit is 16"),
        ({"rank_pattern": {"q_proj": "9"}}, "rank_pattern.q_proj is '9'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is ['q_proj']; it must be an object"),
        ({"rank_pattern": {"(a+)+$": 8}}, "regular expressions are not supported"),
        ({"rank_pattern": {".*q_proj": 8}}, "rank_pattern has the key '.*q_proj': regular expressions"),
        ({"alpha_pattern": {"q_proj|k_proj": 8}}, "alpha_pattern has the key 'q_proj|k_proj': regular expressions"),
        ({"rank_pattern": {"": 8}}, "rank_pattern has the key '': regular expressions"),
        ({"rank_pattern": {"^q_proj": 99}}, "rank is 99, but the limit is 16"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000000"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"target_modules": [1]}, "target_modules is no list of names"),
        ({"target_modules": {"q_proj": 1}}, "target_modules is no list of names"),
        ({"target_modules": ["q_proj"]}, "which is not among its target_modules"),
        ({"exclude_modules": ".*"}, "exclude_modules is a regular expression"),
        ({"exclude_modules": ["v_proj"]}, "which is not among its target_modules"),
        ({"layers_to_transform": [0]}, "which is not among its target_modules"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform is ['0']"),
        ({"r": 4}, "has shape (8, 64), but model and configuration ask for (4, 64)"),
    ],
)
def test_a_configuration_that_is_wrong_or_asks_for_more_is_refused(
    stage: Stage, values: dict[str, object], reason: str
) -> None:
    stage.configure(**values)

    assert reason in stage.refused()


MODULES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 10)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.q_proj")
]


@pytest.mark.parametrize(
    "pattern",
    [
        {"q_proj": 3},
        {"^q_proj": 3, "self_attn.q_proj": 4},
        {r"^model\.layers\.1\.mlp\.up_proj": 3, r"layers\.1\.mlp\.up_proj$": 4, "up_proj": 5},
        {"^model.layers.1.self_attn.k_proj$": 3, "k_proj": 4, "k_proj$": 5},
        {"layers.0.self_attn.q_proj": 3, "model.layers.0.self_attn.q_proj": 4, "proj": 5},
        {"0.self_attn.q_proj": 3, "_proj": 4},
    ],
)
def test_patterns_mean_the_modules_that_they_mean_to_peft(pattern: dict[str, int]) -> None:
    config = parse_config(json.dumps({"peft_type": "LORA", "r": 2, "rank_pattern": pattern}).encode())

    assert [config.rank_of(each) for each in MODULES] == [
        pattern.get(get_pattern_key(list(pattern), each), 2) for each in MODULES
    ]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}"],
)
def test_a_configuration_that_is_no_object_is_refused(stage: Stage, content: bytes) -> None:
    (stage.folder / CONFIG).write_bytes(content)

    assert CONFIG in stage.refused() or "r is " in stage.refused()


def test_regular_expressions_of_an_adapter_are_never_run(stage: Stage) -> None:
    """One like this takes longer than the universe has, on any name that does not match."""
    stage.configure(target_modules="(m|mo|mod|.)*(.|..|...)*!")

    assert stage.store.load("mine", stage.folder).rank == 8  # its weights tell what it changes


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (lambda t: t.pop(f"{PREFIX}.lora_B.weight"), "lacks model.layers.0.self_attn.q_proj.lora_B"),
        (
            lambda t: [t.pop(f"{PREFIX}.lora_{matrix}.weight") for matrix in "AB"],
            "model.layers.0.self_attn.q_proj is among its target_modules",
        ),
        (lambda t: t.clear(), "is among its target_modules, but"),
        (lambda t: t[f"{PREFIX}.lora_A.weight"].fill_(float("nan")), "no finite numbers"),
        (lambda t: t[f"{PREFIX}.lora_B.weight"].fill_(float("-inf")), "no finite numbers"),
        (lambda t: t[f"{PREFIX}.lora_B.weight"].fill_(3e38), "no finite numbers"),
        (lambda t: t.update({f"{PREFIX}.lora_A.weight": torch.zeros(8, 63)}), "has shape (8, 63)"),
        (lambda t: t.update({f"{PREFIX}.lora_A.weight": torch.zeros(8, 64, 1)}), "has shape (8, 64, 1)"),
        (lambda t: t.update({f"{PREFIX}.lora_B.weight": torch.zeros(64, 9)}), "has shape (64, 9)"),
        (lambda t: t.update({f"{PREFIX}.lora_A.weight": torch.zeros(8, 64, dtype=torch.int8)}), "is of torch.int8"),
        (lambda t: t.update({f"{PREFIX}.lora_magnitude_vector": torch.ones(64)}), "1 tensors are no LoRA matrices"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(4, 4)}), "base_model.model.lm_head.weight"),
        (
            lambda t: t.update({f"base_model.model.lm_head.lora_{matrix}.weight": torch.ones(8, 8) for matrix in "AB"}),
            "1 modules are not of this model, or not supported: lm_head",
        ),
        (
            lambda t: t.update(
                {f"{PREFIX.replace('0', '3')}.lora_{matrix}.weight": torch.ones(8, 8) for matrix in "AB"}
            ),
            "model.layers.3.self_attn.q_proj",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(stage: Stage, how: Callable[[Tensors], object], reason: str) -> None:
    stage.change(how)

    assert reason in stage.refused()


def test_nothing_at_all_is_no_adapter(stage: Stage) -> None:
    stage.configure(target_modules="all-linear")
    stage.change(lambda tensors: tensors.clear())

    assert "it changes no layer at all" in stage.refused()


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(stage: Stage, name: str) -> None:
    (stage.folder / name).unlink()

    assert f"the adapter has no {name}" in stage.refused()


def test_a_folder_that_is_not_there_is_refused(stage: Stage) -> None:
    shutil.rmtree(stage.folder)

    assert f"the adapter has no {CONFIG}" in stage.refused()


def test_a_pickle_is_never_opened(stage: Stage) -> None:
    (stage.folder / WEIGHTS).rename(stage.folder / "adapter_model.bin")

    assert "adapter_model.bin is a pickle, which is never loaded" in stage.refused()


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_refused(stage: Stage, name: str) -> None:
    (stage.folder / name).unlink()
    os.mkfifo(stage.folder / name)
    assert f"the adapter has no {name}" in stage.refused()

    (stage.folder / name).unlink()
    (stage.folder / name).mkdir()
    assert f"the adapter has no {name}" in stage.refused()


def test_files_larger_than_any_adapter_of_this_model_are_not_read_to_their_end(stage: Stage) -> None:
    with (stage.folder / WEIGHTS).open("r+b") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    assert "more than an adapter of this model can have" in stage.refused()

    (stage.folder / CONFIG).write_bytes(b" " * (1 << 20) + b"{}")
    assert f"{CONFIG} is longer than" in stage.refused()


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, 5000])
def test_a_cut_off_file_of_weights_is_refused(stage: Stage, num_bytes: int) -> None:
    with (stage.folder / WEIGHTS).open("r+b") as file:
        file.truncate(num_bytes)

    assert "is not a readable safetensors file" in stage.refused()
