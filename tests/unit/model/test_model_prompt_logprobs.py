"""Log-probabilities of prompts from hidden states, against torch's log-softmax in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_tiny_model

from kvwatch_engine.contracts.step import ScoredSpan
from kvwatch_engine.model.loader import LoadedModel, load_model
from kvwatch_engine.model.prompt_logprobs import PromptScorer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_model(str(folder), dtype="float32")


def hidden_states(model: LoadedModel, count: int) -> torch.Tensor:
    return torch.randn(count, model.info.hidden_size, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("rows_at_once", [1, 3, 1000])
def test_spans_of_several_prompts_are_scored_like_log_softmax_does_whatever_the_slices(
    model: LoadedModel, rows_at_once: int
) -> None:
    hidden = hidden_states(model, 24)
    spans = [ScoredSpan(2, [5, 9, 400, 7], 3), ScoredSpan(8, [1], 0), ScoredSpan(10, list(range(50, 63)), 20)]
    scorer = PromptScorer(model.decoder, model.info, slice_bytes=rows_at_once * 4 * model.info.vocab_size)

    with torch.inference_mode():
        scored = scorer.score(hidden, spans)
        reference = torch.log_softmax(model.decoder.logits(hidden).double(), dim=-1).numpy()

    for span, found in zip(spans, scored, strict=True):
        assert found.token_ids.tolist() == list(span.token_ids)
        for place, token in enumerate(span.token_ids):
            row = reference[span.start + place]
            assert found.logprobs[place] == pytest.approx(row[token], abs=1e-5)
            assert found.ranks[place] == 1 + (row > row[token]).sum()
            best = np.argsort(-row, kind="stable")[: span.num_top]
            assert found.top_token_ids[place].tolist() == best.tolist()
            np.testing.assert_allclose(found.top_logprobs[place], row[best], atol=1e-5)


def test_equal_logits_are_told_in_the_order_of_their_ids(model: LoadedModel) -> None:
    scorer = PromptScorer(model.decoder, model.info)

    with torch.inference_mode():  # all logits of a hidden state of zeros are zero
        [found] = scorer.score(torch.zeros(3, model.info.hidden_size), [ScoredSpan(0, [400, 2, 0], 5)])

    assert found.top_token_ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert found.ranks.tolist() == [1, 1, 1]
    np.testing.assert_allclose(found.logprobs, -np.log(model.info.vocab_size), rtol=1e-6)


def test_more_likely_tokens_than_there_are_in_the_vocabulary_are_all_of_them(model: LoadedModel) -> None:
    scorer = PromptScorer(model.decoder, model.info)

    with torch.inference_mode():
        [found] = scorer.score(hidden_states(model, 2), [ScoredSpan(0, [1], model.info.vocab_size)])

    assert sorted(found.top_token_ids[0].tolist()) == list(range(model.info.vocab_size))
