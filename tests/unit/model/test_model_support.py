"""What the general path cannot serve is refused from the configuration alone, with the reason."""

from typing import Any

import pytest
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    FalconConfig,
    Gemma3Config,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    MptConfig,
    Qwen3NextConfig,
    T5Config,
)

from kvwatch_engine.contracts.errors import ModelError
from kvwatch_engine.model.transformers_backend.support import causal_model_class


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration is not supported: it has"),
        (BartConfig(architectures=["BartForCausalLM"]), "BartForCausalLM is not supported: it has an encoder"),
        (Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]), "it sees images or hears"),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), "it is no language model; that of its kind is"),
        (MambaConfig(architectures=["MambaForCausalLM"]), "some of its layers keep a recurrent state"),
        (Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]), "some of its layers keep a recurrent state"),
        (Llama4TextConfig(architectures=["Llama4ForCausalLM"]), "it has layers of type chunked_attention"),
        (BloomConfig(architectures=["BloomForCausalLM"]), "without asking its attention interface"),
        (MptConfig(architectures=["MPTForCausalLM"]), "MPTForCausalLM is not supported"),
        (FalconConfig(architectures=["FalconForCausalLM"], alibi=True), "is not supported with alibi"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        causal_model_class(config)


@pytest.mark.parametrize("config", [MixtralConfig(), GPT2Config(), FalconConfig(alibi=False), BertConfig()])
def test_what_may_work_passes_with_or_without_an_architecture(config: Any) -> None:
    found = causal_model_class(config)

    assert "LM" in found.__name__
    config.architectures = [found.__name__]
    assert causal_model_class(config) is found
