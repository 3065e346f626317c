"""Deliberate faults of LoRA adapters: a wrong sum, the wrong tokens, shared blocks, weights freed too early."""

from mutate.fault import Fault

ENGINE = "tests/unit/engine/test_engine_adapters.py"
EQUALITY = "tests/integration/test_lora_equality.py"
TEXTS = f"{EQUALITY}::test_several_adapters_in_one_batch_each_give_pefts_text[llama]"
RELOAD = f"{EQUALITY}::test_each_adapter_misses_cold_and_hits_warm_and_a_reload_is_cold_again[llama]"
SERVER = "tests/integration/test_lora_server.py"
FILES = "tests/unit/model/test_model_lora_files.py"

LORA = (
    Fault(
        name="adapters-unscaled",
        stands_for="What an adapter adds is not multiplied by alpha / rank.",
        file="engine/kvwatch_engine/model/lora_files.py",
        old=".float() * self._config.scaling_of(found.name)",
        new=".float()",
        tests=(TEXTS,),
    ),
    Fault(
        name="rank-stabilised-like-others",
        stands_for="use_rslora is read and forgotten.",
        file="engine/kvwatch_engine/model/lora_config.py",
        old="math.sqrt(rank) if self.is_rank_stabilised else rank",
        new="rank",
        tests=(TEXTS,),
    ),
    Fault(
        name="values-added-to-keys",
        stands_for="An adapter's values land where the fused layer's keys are.",
        file="engine/kvwatch_engine/model/lora.py",
        old='Projection("self_attn.v_proj", "qkv", hidden, keys, queries + keys)',
        new='Projection("self_attn.v_proj", "qkv", hidden, keys, queries)',
        tests=(TEXTS,),
    ),
    Fault(
        name="adapter-of-the-last-sequence-only",
        stands_for="Of several sequences with one adapter in a step only the last is computed with it.",
        file="engine/kvwatch_engine/scheduling/step_builder.py",
        old="start = spans.pop().start if spans and spans[-1].load_id == load_id else query_starts[index]",
        new="start = query_starts[index]\n        if spans and spans[-1].load_id == load_id:\n            spans.pop()",
        tests=(f"{ENGINE}::test_the_tokens_of_an_adapter_lie_side_by_side_and_all_of_them_are_in_its_span",),
    ),
    Fault(
        name="blocks-shared-with-the-base-model",
        stands_for="An adapter's requests find K/V that was computed without it.",
        file="engine/kvwatch_engine/core.py",
        old='adapter = source.load_id.encode() if source.load_id is not None else b""',
        new='adapter = b""',
        tests=(f"{ENGINE}::test_requests_of_different_adapters_share_no_block_and_those_of_one_do",),
    ),
    Fault(
        name="adapter-freed-under-its-requests",
        stands_for="Unloading frees the weights at once, though requests still need them.",
        file="engine/kvwatch_engine/adapter_gate.py",
        old="unused = [load_id for load_id in self._retired if load_id not in used]",
        new="unused = [load_id for load_id in self._retired if used is not None]",
        tests=(f"{ENGINE}::test_a_retired_adapter_is_freed_when_its_last_request_has_ended_and_not_before",),
    ),
    Fault(
        name="links-out-of-the-folder",
        stands_for="Through the API files anywhere on the machine can be read, by a link in an allowed folder.",
        file="engine/kvwatch_engine/server/adapters.py",
        old="if is_within and all(file.resolve().is_relative_to(base) for file in folder.iterdir()):",
        new="if is_within:",
        tests=(f"{SERVER}::test_paths_that_lead_out_of_the_allowed_folder_are_refused_like_those_to_nowhere",),
    ),
    Fault(
        name="modules-left-over",
        stands_for="Matrices of modules that the model lacks are dropped in silence.",
        file="engine/kvwatch_engine/model/lora_files.py",
        old="        if self._modules:\n            known",
        new="        if len(self._modules) > 1000:\n            known",
        tests=(f"{FILES}::test_weights_that_do_not_fit_are_refused",),
    ),
    Fault(
        name="a-reload-is-the-same-adapter",
        stands_for="The load id is the name: after a reload requests find what the old weights have computed.",
        file="engine/kvwatch_engine/model/adapters.py",
        old="LoadId(secrets.token_hex(16))",
        new="LoadId(name)",
        tests=(RELOAD,),
    ),
    Fault(
        name="equal-files-are-one-adapter",
        stands_for="The load id is the fingerprint of the files: whoever unloads one of two frees both.",
        file="engine/kvwatch_engine/model/adapters.py",
        old="LoadId(secrets.token_hex(16))",
        new="LoadId(weights.fingerprint)",
        tests=(RELOAD,),
    ),
    Fault(
        name="rows-of-two-adapters-swapped",
        stands_for="In a batch of several adapters each is given another one's tokens.",
        file="engine/kvwatch_engine/model/adapters.py",
        old="self._weights[span.load_id]) for span in spans]",
        new="self._weights[other.load_id]) for span, other in zip(spans, [*spans][::-1])]",
        tests=(TEXTS,),
    ),
    Fault(
        name="an-adapter-acts-on-everybody",
        stands_for="In a batch of several adapters all tokens are computed with all of them.",
        file="engine/kvwatch_engine/model/lora.py",
        old="            linear.add(x[tokens], y[tokens])\n",
        new="            linear.add(x, y)\n",
        tests=(TEXTS,),
    ),
    Fault(
        name="a-whole-name-is-taken-for-an-end",
        stands_for="`^` in a pattern of ranks is dropped: modules are meant that PEFT does not mean.",
        file="engine/kvwatch_engine/model/lora_config.py",
        old='    return module == key[1:] if key.startswith("^") else _ends_with(module, key)\n',
        new='    return _ends_with(module, key.removeprefix("^"))\n',
        tests=(f"{FILES}::test_patterns_mean_the_modules_that_they_mean_to_peft",),
    ),
)
