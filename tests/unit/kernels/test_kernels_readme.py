"""The example of kernels/README.md does what it says."""

from pathlib import Path

import torch
from torch.nn import functional

README = Path(__file__).parents[3] / "kernels" / "README.md"


def test_the_example_attends_to_its_prompt_and_copies_its_blocks() -> None:
    source = README.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, torch.Tensor] = {}

    exec(source, names)

    query, key, value = (names[name].transpose(0, 1) for name in ("query", "key", "value"))
    truth = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(names["out"], truth.transpose(0, 1))
    assert names["cache"][3].any()
    assert torch.equal(names["cache"][[1, 2]], names["cache"][[3, 5]])
