"""Prompts with images: greedy text equals transformers' `generate`, token for token, however the engine gets there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import run_until_idle
from image_engine import BLOCK_SIZE, answers, cached_tokens, check, make_engine
from image_oracle import NUM_NEW_TOKENS, Oracle, Prompt
from tiny_vision_model import IMAGE, NUM_IMAGE_TOKENS, make_tiny_vision_model

from kvwatch_engine.contracts.errors import RequestInvalid
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.model.image_encoder import ImageEncoder
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.scheduling.limits import check_valid

TEXTS: list[tuple[str, tuple[int, ...]]] = [
    (f"{IMAGE}what is this?", (1,)),
    (f"a picture: {IMAGE}", (2,)),
    (f"first {IMAGE} then, between them, {IMAGE} and after", (1, 3)),
    (f"{IMAGE}{IMAGE}{IMAGE}", (4, 4, 5)),
    ("no picture at all, only words", ()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[Prompt]:
    return [oracle.prompt(text, *pictures) if pictures else oracle.plain(text) for text, pictures in TEXTS]


@pytest.fixture
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


def encoder_of(model: LoadedModel) -> ImageEncoder:
    assert model.images is not None
    return model.images


def test_the_pictures_make_a_difference(oracle: Oracle) -> None:
    text = f"first {IMAGE} then"
    assert oracle.answer(oracle.prompt(text, 1)) != oracle.answer(oracle.prompt(text, 2))


def test_alone_cold_and_then_warm_without_looking_at_the_images_again(
    oracle: Oracle, prompts: list[Prompt], model: LoadedModel
) -> None:
    core = make_engine(model)
    encoder = encoder_of(model)
    encoder.max_cache_bytes = 0

    check(oracle, prompts, [answers(core, [prompt])[0] for prompt in prompts])

    num_cold = encoder.num_encoded
    assert num_cold == 7, "once for each picture of each prompt, since no features are kept"
    check(oracle, prompts, [answers(core, [prompt])[0] for prompt in prompts])
    # A prompt that ends with its image computes at least its last token anew.
    assert encoder.num_encoded - num_cold == 2


@pytest.mark.parametrize("chunk", [1, 2, 5, 7])
@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_in_a_batch_whose_chunks_cut_the_images_in_pieces(
    oracle: Oracle, prompts: list[Prompt], model: LoadedModel, chunk: int, cache_bytes: int
) -> None:
    core = make_engine(model, max_prefill_chunk=chunk)
    encoder = encoder_of(model)
    encoder.max_cache_bytes = cache_bytes

    check(oracle, prompts, answers(core, prompts))

    assert chunk < NUM_IMAGE_TOKENS
    if cache_bytes:
        assert encoder.num_encoded == 5, "each of the five pictures once, however many chunks and requests have it"
        assert encoder.cached_bytes == 5 * NUM_IMAGE_TOKENS * model.info.hidden_size * 4
    else:
        assert encoder.num_encoded > 7
        assert encoder.cached_bytes == 0


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_requests_with_images_are_preempted_and_computed_again(
    oracle: Oracle, prompts: list[Prompt], model: LoadedModel, enable_prefix_cache: bool
) -> None:
    core = make_engine(
        model, num_blocks=18, max_prefill_chunk=5, enable_prefix_cache=enable_prefix_cache, reserve_prompt=False
    )

    found = answers(core, prompts)

    assert core.scheduler.num_preemptions > 0, "the pool is meant to be too small"
    check(oracle, prompts, found)


def test_another_image_of_the_same_size_shares_the_text_before_it_and_nothing_from_it_on(
    oracle: Oracle, model: LoadedModel
) -> None:
    text = f"the same words stand before it: {IMAGE} and the same words stand behind it"
    first, other = oracle.prompt(text, 1), oracle.prompt(text, 2)
    assert first.token_ids == other.token_ids
    core = make_engine(model)
    before = first.images[0].position // BLOCK_SIZE * BLOCK_SIZE
    assert 0 < before < first.images[0].position, "a block holds the end of the text and the first image tokens"

    assert cached_tokens(core, first) == 0
    assert cached_tokens(core, other) == before
    for prompt in (first, other):
        assert cached_tokens(core, prompt) == (len(prompt.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        check(oracle, [prompt], answers(core, [prompt]))


def test_the_same_images_in_another_order_share_nothing_from_the_first_one_on(
    oracle: Oracle, model: LoadedModel
) -> None:
    text = f"{IMAGE} or {IMAGE}"
    core = make_engine(model)

    assert cached_tokens(core, oracle.prompt(text, 1, 2)) == 0
    assert cached_tokens(core, oracle.prompt(text, 2, 1)) == 0
    half_the_same = oracle.prompt(text, 1, 3)
    assert cached_tokens(core, half_the_same) == half_the_same.images[1].position // BLOCK_SIZE * BLOCK_SIZE


def test_several_sequences_of_one_prompt_see_the_image(oracle: Oracle, model: LoadedModel) -> None:
    prompt = oracle.prompt(f"look: {IMAGE}!", 6)
    core = make_engine(model)

    core.add(prompt.request("r", n=3), 0)
    tokens = run_until_idle(core)

    for sequence in range(3):
        oracle.check(prompt, tokens["r", sequence])


def test_a_placeholder_is_never_generated_however_much_it_is_wanted(oracle: Oracle, model: LoadedModel) -> None:
    prompt = oracle.prompt(f"look: {IMAGE}!", 6)
    core = make_engine(model)

    core.add(prompt.request("r", logit_bias=((oracle.placeholder, 100.0),), repetition_penalty=10.0), 0)
    core.add(prompt.request("s", temperature=2.0, seed=1, logprobs=3), 0)
    tokens = run_until_idle(core)

    for sequence in tokens.values():
        assert len(sequence) == NUM_NEW_TOKENS
        assert oracle.placeholder not in sequence


def test_kept_features_have_a_bound_and_the_latest_ones_stay(oracle: Oracle, model: LoadedModel) -> None:
    core, encoder = make_engine(model, enable_prefix_cache=False), encoder_of(model)
    one = NUM_IMAGE_TOKENS * model.info.hidden_size * 4
    encoder.max_cache_bytes = 2 * one
    texts = {seed: oracle.prompt(f"{IMAGE}?", seed) for seed in (1, 2, 3)}

    answers(core, [texts[1], texts[2], texts[1], texts[3]])
    assert encoder.num_encoded == 3
    assert encoder.cached_bytes == 2 * one
    answers(core, [texts[1], texts[3]])
    assert encoder.num_encoded == 3
    answers(core, [texts[2]])
    assert encoder.num_encoded == 4


@pytest.mark.parametrize(
    ("config", "num_tokens"),
    [
        ({"vision_feature_layer": -1}, 9),
        ({"vision_feature_layer": [-3, -2]}, 9),
        ({"vision_feature_select_strategy": "full"}, 10),
        ({"multimodal_projector_bias": False, "projector_hidden_act": "relu"}, 9),
        ({"vision": {"num_hidden_layers": 1}, "tie_word_embeddings": True}, 9),
        ({"vision": {"model_type": "siglip_vision_model"}, "vision_feature_select_strategy": "full"}, 9),
        ({"text": {"model_type": "qwen2"}}, 9),
        ({"text": {"model_type": "qwen3", "head_dim": 16}}, 9),
        ({"text": {"model_type": "mistral", "sliding_window": 12}}, 9),
    ],
    ids=str,
)
def test_every_kind_of_tower_and_decoder_does_what_its_configuration_says(
    tmp_path: Path, config: dict[str, Any], num_tokens: int
) -> None:
    folder = make_tiny_vision_model(tmp_path, **config)
    oracle, model = Oracle(folder), load_model(str(folder), dtype="float32")
    prompts = [oracle.prompt(f"a {IMAGE} b {IMAGE}", 1, 2)]

    check(oracle, prompts, answers(make_engine(model, max_prefill_chunk=8), prompts))

    assert encoder_of(model).input.num_tokens == num_tokens


def test_in_bfloat16_an_image_is_seen_as_well(oracle: Oracle, folder: Path) -> None:
    model = load_model(str(folder), dtype="bfloat16")
    one, other = (answers(make_engine(model), [oracle.prompt(f"see {IMAGE}", seed)])[0] for seed in (1, 2))

    assert one != other
    assert encoder_of(model).num_encoded == 2


def test_images_that_do_not_lie_in_the_prompt_are_refused(oracle: Oracle) -> None:
    prompt = oracle.prompt(f"{IMAGE}{IMAGE}", 1, 2)
    request = prompt.request("r")
    settings = EngineSettings(num_blocks=100)
    check_valid(request, settings)
    first, second = prompt.images
    for images in [(second, first), (first, replace(second, position=8)), (first, replace(second, num_tokens=10))]:
        with pytest.raises(RequestInvalid, match="an image has tokens"):
            check_valid(replace(request, images=images), settings)


def test_features_are_the_same_whatever_else_the_step_holds(oracle: Oracle, model: LoadedModel) -> None:
    """They are shared through the prefix cache: no bit may depend on the neighbours."""
    encoder = encoder_of(model)
    encoder.max_cache_bytes = 0
    images = oracle.prompt(f"{IMAGE}{IMAGE}", 1, 2).images

    with torch.inference_mode():
        alone = encoder.features(images[0].image)
        encoder.features(images[1].image)
        assert torch.equal(encoder.features(images[0].image), alone)
