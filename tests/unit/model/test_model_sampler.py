"""Sampling against a naive float64 implementation that sorts everything, and by distribution."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from paged_sequences import sample_row

from kvwatch_engine.contracts.sampling import SamplingParams
from kvwatch_engine.contracts.step import SampleRow
from kvwatch_engine.model.drawing import uniform
from kvwatch_engine.model.sampler import NO_TOKEN, sample
from kvwatch_engine.model.step_logits import StepLogits

VOCAB = 300


def choose(logits: npt.ArrayLike, rows: Sequence[SampleRow]) -> list[int]:
    """Sample each row from the one set of logits."""
    return sample(StepLogits.of(torch.tensor(np.asarray(logits, np.float32))[None]), rows, [0] * len(rows)).token_ids


def naive_logits(logits: npt.NDArray[np.float32], row: SampleRow) -> npt.NDArray[np.float64]:
    """Apply penalties, bias and forbidden tokens as SamplingParams documents, one token at a time."""
    params = row.params
    values = logits.astype(np.float64)
    output = list(row.output_token_ids)[: row.position]
    for token in set(row.prompt_token_ids) | set(output):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, count in Counter(output).items():
        values[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in row.forbidden_token_ids:
        values[token] = -math.inf
    return values


def naive_token(logits: npt.NDArray[np.float32], row: SampleRow) -> int:
    """Sort everything, filter one token at a time, walk to the drawn one; all in float64."""
    params = row.params
    values = naive_logits(logits, row)
    if params.temperature == 0:
        return int(values.argmax())
    values /= params.temperature
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    probabilities = np.exp(values[order] - values[order[0]])
    if params.top_k:
        probabilities[params.top_k :] = 0
    probabilities /= probabilities.sum()
    kept = []
    total = 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if total >= params.top_p or probability < params.min_p * probabilities[0]:
            break
        kept.append((token, probability))
        total += probability
    passed = np.cumsum([probability for _, probability in kept])
    return kept[int((passed <= uniform(row.seed, row.position) * total).sum())][0]


FILTERS = {
    "nothing": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.3),
    "top_k": SamplingParams(top_k=7),
    "top_k of one": SamplingParams(top_k=1),
    "top_k beyond the vocabulary": SamplingParams(top_k=10 * VOCAB),
    "top_p": SamplingParams(top_p=0.6),
    "tiny top_p": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.1),
    "min_p of one": SamplingParams(min_p=1.0),
    "all filters": SamplingParams(temperature=0.9, top_k=40, top_p=0.8, min_p=0.02),
    "penalties": SamplingParams(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
    "negative penalties": SamplingParams(presence_penalty=-2.0, frequency_penalty=-2.0, repetition_penalty=0.5),
    "bias": SamplingParams(logit_bias=((3, 100.0), (4, -100.0), (5, 5.5))),
    "greedy with penalties": SamplingParams(temperature=0.0, frequency_penalty=1.9, repetition_penalty=1.1),
    "greedy with bias": SamplingParams(temperature=0.0, logit_bias=((17, 50.0),)),
}


@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_chooses_what_the_naive_implementation_chooses(name: str, spread: float) -> None:
    # float32 weights may decide otherwise for a number within 1e-8 of the border between two tokens; here none is.
    generator = np.random.default_rng(12)
    for trial in range(40):
        logits = (generator.normal(size=VOCAB) * spread).astype(np.float32)
        output = generator.integers(0, VOCAB, size=60).tolist()
        row = sample_row(
            FILTERS[name],
            seed=int(generator.integers(0, 2**63)),
            position=trial,
            prompt=generator.integers(0, VOCAB, size=30).tolist(),
            output=output,
            forbidden=(int(logits.argmax()),) if trial % 3 == 0 else (),
        )

        assert choose(logits, [row]) == [naive_token(logits, row)]


def test_ties_are_broken_by_token_id_in_every_mode() -> None:
    logits = np.full(VOCAB, -4.0, dtype=np.float32)
    logits[[9, 50, 200]] = [-0.0, 0.0, -0.0]

    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(top_p=1e-9)):
        assert choose(logits, [sample_row(params, seed=seed) for seed in range(5)]) == [9] * 5


def test_tokens_that_differ_by_less_than_the_scaled_logits_show_keep_their_order() -> None:
    logits = np.array([100.0, 1e-6, 2e-6])
    params = SamplingParams(temperature=1e9, top_k=2)

    tokens = choose(logits, [sample_row(params, seed=seed) for seed in range(100)])

    assert set(tokens) == {0, 2}


def chi_square(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


def test_draws_follow_the_softmax_distribution() -> None:
    logits = np.linspace(-1.5, 1.5, 20).astype(np.float32)
    draws = 20_000

    tokens = choose(logits, [sample_row(SamplingParams(), seed=5, position=i) for i in range(draws)])

    expected = np.exp(logits.astype(np.float64))
    expected *= draws / expected.sum()
    assert chi_square(np.bincount(tokens, minlength=20), expected) < 43.8  # 99.9 % point of 19 degrees of freedom


def test_filtered_draws_follow_the_renormalised_distribution() -> None:
    logits = np.linspace(-1.5, 1.5, 20).astype(np.float32)
    draws = 20_000

    rows = [sample_row(SamplingParams(top_k=5), seed=seed) for seed in range(draws)]
    counts = np.bincount(choose(logits, rows), minlength=20)

    expected = np.exp(logits[-5:].astype(np.float64))
    expected *= draws / expected.sum()
    assert counts[:-5].sum() == 0
    assert chi_square(counts[-5:], expected) < 18.5  # 99.9 % point of 4 degrees of freedom


def test_uniform_numbers_are_uniform_over_positions_and_over_neighbouring_seeds() -> None:
    bins = 50
    for numbers in ([uniform(3, i) for i in range(20_000)], [uniform(i, 0) for i in range(20_000)]):
        counts = np.histogram(numbers, bins=bins, range=(0.0, 1.0))[0]
        assert chi_square(counts, np.full(bins, 400.0)) < 85.4  # 99.9 % point of 49 degrees of freedom


def test_uniform_numbers_of_different_seeds_and_positions_are_independent() -> None:
    first = np.array([uniform(1, i) for i in range(5000)])
    second = np.array([uniform(2, i) for i in range(5000)])

    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.05


def test_seeds_outside_of_64_bits_are_accepted() -> None:
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert 0 <= uniform(2**70 + 3, 2**40) < 1


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    generator = np.random.default_rng(2)
    logits = torch.tensor(generator.normal(size=(16, VOCAB)).astype(np.float32))
    rows = [sample_row(SamplingParams(temperature=1.3, top_p=0.95), seed=i, position=9) for i in range(16)]

    together = sample(StepLogits.of(logits), rows, list(range(16))).token_ids
    alone = [sample(StepLogits.of(logits[i : i + 1].clone()), [rows[i]], [0]).token_ids[0] for i in range(16)]
    backwards = sample(StepLogits.of(logits), rows[::-1], list(range(16))[::-1]).token_ids[::-1]

    assert together == alone == backwards
    assert len(set(together)) > 5


def test_sequences_that_share_logits_draw_by_their_own_seeds() -> None:
    logits = torch.zeros(2, VOCAB)
    rows = [sample_row(SamplingParams(), seed=seed) for seed in (1, 2, 1)]

    first, second, third = sample(StepLogits.of(logits), rows, [0, 0, 1]).token_ids

    assert first == third
    assert first != second


@pytest.mark.parametrize("temperature", [1e-4, 1e-20, 1e-45, 5e-324])
def test_tiny_temperatures_are_greedy_and_do_not_overflow(temperature: float) -> None:
    logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32) * 50

    rows = [sample_row(SamplingParams(temperature=temperature), seed=seed) for seed in range(20)]

    assert choose(logits, rows) == [int(logits.argmax())] * 20


def test_a_huge_temperature_is_uniform() -> None:
    tokens = choose(np.arange(VOCAB), [sample_row(SamplingParams(temperature=1e30), seed=i) for i in range(3000)])

    assert len(set(tokens)) > 0.99 * VOCAB


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_end_only_their_own_row(bad: float, temperature: float) -> None:
    logits = torch.arange(3 * VOCAB, dtype=torch.float32).reshape(3, VOCAB).fmod(7)
    logits[1, 40] = bad
    rows = [sample_row(SamplingParams(temperature=temperature, logprobs=1)) for _ in range(3)]

    samples = sample(StepLogits.of(logits), rows, [0, 1, 2])

    assert list(samples.errors) == [1]
    assert "finite" in samples.errors[1]
    assert samples.token_ids[1] == NO_TOKEN
    assert samples.logprobs[1] is None
    for healthy in (0, 2):
        assert [samples.token_ids[healthy]] == choose(logits[healthy].numpy(), [rows[healthy]])
        assert samples.logprobs[healthy] is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_forbids_every_token_gets_an_error(temperature: float) -> None:
    rows = [sample_row(SamplingParams(temperature=temperature), forbidden=range(VOCAB)), sample_row()]

    samples = sample(StepLogits.of(torch.zeros(1, VOCAB)), rows, [0, 0])

    assert samples.errors == {0: "every token of the vocabulary is forbidden"}
    assert samples.token_ids[1] == 0


def test_forbidden_tokens_are_never_drawn_however_likely_they_are() -> None:
    logits = np.zeros(VOCAB)
    logits[[4, 5]] = 30.0

    rows = [sample_row(SamplingParams(temperature=2.0), seed=i, forbidden=(4, 5)) for i in range(500)]

    assert not {4, 5} & set(choose(logits, rows))


def test_tokens_outside_of_the_vocabulary_may_be_forbidden_or_biased_without_effect() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((VOCAB, 99.0), (-1, 99.0)))

    assert choose(np.arange(VOCAB), [sample_row(params, forbidden=(-1, VOCAB, 10**9))]) == [VOCAB - 1]


def test_penalties_count_only_the_tokens_before_the_position() -> None:
    logits = np.array([0.0, 2.0, 1.5])
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)

    assert choose(logits, [sample_row(params, position=0, output=[1, 1])]) == [1]
    assert choose(logits, [sample_row(params, position=1, output=[1, 1])]) == [2]


def test_presence_and_frequency_penalties_ignore_the_prompt() -> None:
    logits = np.array([0.0, 2.0, 1.5])
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)

    assert choose(logits, [sample_row(params, prompt=[1, 1, 1])]) == [1]


def test_sampling_never_writes_the_logits() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    before = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, logit_bias=((1, 5.0),), logprobs=5)

    sample(StepLogits.of(logits), [sample_row(params, prompt=[1, 2], forbidden=(7,))], [0])

    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_model_before_penalties_and_temperature() -> None:
    logits = torch.tensor(np.random.default_rng(4).normal(size=(1, VOCAB)).astype(np.float32) * 8)
    params = SamplingParams(temperature=0.0, logit_bias=((12, 1000.0),), logprobs=5)

    samples = sample(StepLogits.of(logits), [sample_row(params)], [0])

    expected = torch.log_softmax(logits[0].double(), dim=-1)
    values, token_ids = expected.topk(5)
    logprobs = samples.logprobs[0]
    assert logprobs is not None
    assert logprobs.chosen.token_id == samples.token_ids[0] == 12
    assert logprobs.chosen.logprob == pytest.approx(float(expected[12]), abs=1e-5)
    assert [top.token_id for top in logprobs.top] == token_ids.tolist()
    assert [top.logprob for top in logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_can_be_asked_for_without_alternatives_or_for_the_whole_vocabulary() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    rows = [sample_row(SamplingParams(temperature=0.0, logprobs=count)) for count in (0, 9)]

    none, everything = sample(StepLogits.of(logits), rows, [0, 0]).logprobs

    assert none is not None
    assert none.top == ()
    assert everything is not None
    assert [top.token_id for top in everything.top] == [1, 2, 3, 0]


def test_a_step_that_samples_nothing_gives_nothing() -> None:
    samples = sample(StepLogits.of(torch.zeros(0, VOCAB)), [], [])

    assert (samples.token_ids, samples.logprobs, samples.errors) == ([], [], {})
