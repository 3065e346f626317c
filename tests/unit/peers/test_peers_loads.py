import pytest
from peers.loads import LOADS, Load, Words
from tiny_models import embedded_model_folder

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(embedded_model_folder())


@pytest.mark.parametrize("load", LOADS.values(), ids=str)
def test_prompts_have_exactly_their_tokens(words: Words, load: Load) -> None:
    specs = words.requests(load, 3, num_requests=4)

    assert [words.count(spec.prompt) for spec in specs] == [load.num_prompt_tokens] * 4
    assert {spec.max_tokens for spec in specs} == {load.num_output_tokens}


def test_only_what_is_to_be_shared_is_shared(words: Words) -> None:
    load = LOADS["shared-prefix"]
    first, second = (words.requests(load, seed, num_requests=2) for seed in (1, 2))

    def common_words(one: str, other: str) -> int:
        pairs = zip(one.split(), other.split(), strict=True)
        return next(index for index, (left, right) in enumerate(pairs) if left != right)

    assert load.num_shared_tokens <= common_words(first[0].prompt, first[1].prompt) < load.num_shared_tokens + 5
    assert common_words(first[0].prompt, second[0].prompt) < 5


def test_a_seed_decides_everything(words: Words) -> None:
    load = LOADS["burst"]

    assert words.requests(load, 7) == words.requests(load, 7)
    assert words.requests(load, 7) != words.requests(load, 8)
