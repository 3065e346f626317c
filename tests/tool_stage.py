"""A server whose model says what it is told to, with the chat template and the markers of each family of tool calls."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from builders import NullModel
from openai_server import RunningServer, arithmetic_server, byte_level_tokenizer, save_tokenizer
from tokenizers import AddedToken, Tokenizer

TemplateName = Literal["hermes", "llama3", "mistral", "unaware"]
TEMPLATES: tuple[TemplateName, ...] = ("hermes", "llama3", "mistral", "unaware")

_PLAIN = "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
_OPEN = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
CHAT_TEMPLATES: dict[TemplateName, str] = {
    "hermes": (
        "{% if tools %}<|start|>system\nTools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}<|start|>assistant\n{{ m.content }}{% for c in m.tool_calls %}"
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}<|end|>\n{% else %}" + _PLAIN + "{% endif %}{% endfor %}" + _OPEN
    ),
    "llama3": (
        "{% if tools %}<|start|>system\nTools: {% for t in tools %}{{ t.function | tojson }}\n{% endfor %}<|end|>\n"
        "{% endif %}{% for m in messages %}{% if m.tool_calls %}<|start|>assistant\n{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|end|>\n'
        "{% else %}" + _PLAIN + "{% endif %}{% endfor %}" + _OPEN
    ),
    "mistral": (
        "{% if tools %}[TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
        '[TOOL_CALLS][{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": '
        '{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% endfor %}]<|end|>\n'
        "{% else %}" + _PLAIN + "{% endif %}{% endfor %}" + _OPEN
    ),
    "unaware": "{% for m in messages %}" + _PLAIN + "{% endfor %}" + _OPEN,
}


def tool_tokenizer() -> Tokenizer:
    """Return a tokenizer in which some markers are special tokens, some tokens, and some plain text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("<|python_tag|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    return tokenizer


class ScriptedModel(NullModel):
    """Says one text, and then ends; what a grammar forbids is replaced by what comes next in the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer.get_vocab_size())
        self._tokenizer = tokenizer
        self._script: list[int] = []
        self.prompts: list[list[int]] = []
        """Prompts that it was given, in order."""

    def say(self, text: str) -> None:
        """Answer every request with this text."""
        self.say_tokens(self.encode(text))

    def say_tokens(self, tokens: list[int]) -> None:
        """Answer every request with these tokens."""
        self._script = tokens

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def next_token(self, prompt: Sequence[int], seed: int, position: int) -> int:
        if position == 0:
            self.prompts.append(list(prompt))
        if not self._script:
            return super().next_token(prompt, seed, position)
        return self._script[position] if position < len(self._script) else 3

    def last_prompt(self) -> str:
        """Return the text of the prompt that came last."""
        return self._tokenizer.decode(self.prompts[-1], skip_special_tokens=False)


@contextmanager
def tool_server(folder: Path, template: TemplateName) -> Iterator[tuple[RunningServer, ScriptedModel]]:
    """Serve a scripted model with one family's template."""
    tokenizer = tool_tokenizer()
    model = ScriptedModel(tokenizer)
    save_tokenizer(folder, tokenizer, CHAT_TEMPLATES[template])
    with arithmetic_server(folder, model, num_blocks=1025, max_model_len=2048) as running:
        yield running, model
