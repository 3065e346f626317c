"""Random LoRA adapters, made, saved and computed by PEFT itself."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def base_model(folder: Path) -> Any:
    """Return transformers' model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def with_adapter(model: Any, adapter: Path) -> Any:
    """Return a model of transformers under an adapter, as PEFT computes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses what transformers deprecates
        return PeftModel.from_pretrained(model, adapter).eval()


def make_adapter(model: Path | Any, folder: Path, *, seed: int, strength: float = 1.0, **config: Any) -> Path:
    """Save an adapter whose every matrix is random, as a folder of PEFT's.

    Args:
        model: the base model, or its folder.
        folder: where to save it.
        seed: of its weights.
        strength: size of what it adds, compared with what the base model's layers make of the same.
        **config: by PEFT's names.

    Returns:
        The folder.
    """
    values = {"r": 8, "lora_alpha": 16, "target_modules": list(ALL_LINEAR), **config}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(seed)
        adapted = get_peft_model(
            base_model(model) if isinstance(model, Path) else model, LoraConfig(task_type="CAUSAL_LM", **values)
        )
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_A" in name:
                    parameter.normal_(0, parameter.shape[1] ** -0.5)
                elif "lora_B" in name:
                    parameter.normal_(0, 0.3 * strength * parameter.shape[1] ** -0.5)
        adapted.save_pretrained(folder)
    return folder


class AdaptedReference:
    """The base model with one adapter, or with none, as PEFT computes it."""

    def __init__(self, model: Path, adapter: Path | None) -> None:
        self._model = base_model(model)
        if adapter is not None:
            self._model = with_adapter(self._model, adapter)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the greedy continuation of exactly so many tokens."""
        output = self._model.generate(
            input_ids=torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return [int(token) for token in output[0, len(prompt) :]]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return f32[num_tokens, vocab]."""
        return torch.as_tensor(self._model(input_ids=torch.tensor([list(tokens)])).logits[0])
