"""Deliberate faults of the general path: what a model asks for and does not get, and what should have been refused."""

from mutate.fault import Fault

FAMILIES = "tests/integration/test_model_families.py::test_greedy_text_alone_and_batched_is_transformers"
GENERAL = "tests/integration/test_model_transformers.py"
GEMMA, FALCON, LATENT = f"{FAMILIES}[Gemma 2]", f"{FAMILIES}[Falcon, grouped heads]", f"{FAMILIES}[DeepSeek-V3"
SAME = f"{GENERAL}::test_what_the_lean_decoder_knows_has_the_same_logits_either_way"
BIASED = f"{GENERAL}::test_a_model_that_computes_something_else_over_a_paged_cache_is_refused"
SUPPORT = "tests/unit/model/test_model_support.py::test_what_cannot_be_served_is_refused_with_its_reason"
NAMES = "tests/unit/serve/test_serve_asked.py::test_names_that_cannot_be_served_are_refused"
BACKEND = "engine/kvwatch_engine/model/transformers_backend"

MODELS = (
    Fault(
        name="soft-caps-are-forgotten",
        stands_for="A model bounds its scores, and the kernel is not told.",
        file=f"{BACKEND}/route.py",
        old="        soft_cap=softcap,\n",
        new="        soft_cap=None,\n",
        tests=(GEMMA,),
    ),
    Fault(
        name="scales-are-guessed",
        stands_for="A model's own factor of the scores is taken for the usual one.",
        file=f"{BACKEND}/route.py",
        old="scale=float(query.shape[3] ** -0.5 if scaling is None else scaling)",
        new="scale=float(query.shape[3] ** -0.5)",
        tests=(GEMMA,),
    ),
    Fault(
        name="windows-are-forgotten",
        stands_for="Layers with a window see all tokens, and their groups hold all blocks.",
        file=f"{BACKEND}/route.py",
        old="        sliding_window=sliding_window,\n        soft_cap",
        new="        sliding_window=None,\n        soft_cap",
        tests=(GEMMA,),
    ),
    Fault(
        name="short-values-are-not-cut",
        stands_for="Values that were padded to the length of keys come back with their padding.",
        file=f"{BACKEND}/route.py",
        old=".view(query.shape)[..., : call.value_dim]",
        new=".view(query.shape)",
        tests=(f"{LATENT} (latent attention, experts)]",),
    ),
    Fault(
        name="falcon-groups-are-mixed",
        stands_for="The key of a group of heads is read where its value lies.",
        file=f"{BACKEND}/falcon.py",
        old="groups[:, :, :, -2], groups[:, :, :, -1]",
        new="groups[:, :, :, -1], groups[:, :, :, -2]",
        tests=(FALCON,),
    ),
    Fault(
        name="logits-come-without-the-models-own-head",
        stands_for="The output layer alone is computed: scales and soft caps of logits are lost.",
        file=f"{BACKEND}/network.py",
        old="self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]",
        new="self.model.lm_head(hidden)",
        tests=(GEMMA,),
    ),
    Fault(
        name="nothing-is-proven",
        stands_for="A model whose attention is biased is served without its bias.",
        file=f"{BACKEND}/proof.py",
        old="    if not found <= _LIMITS[network.dtype]:",
        new="    if found > 1e9:",
        tests=(BIASED,),
    ),
    Fault(
        name="the-proof-begins-each-chunk-anew",
        stands_for="The positions of a second chunk begin with 0: who is right is refused.",
        file=f"{BACKEND}/proof.py",
        old="        positions = torch.cat([torch.arange(*span) for span in spans])",
        new="        positions = torch.cat([torch.arange(end - first) for first, end in spans])",
        tests=(f"{SAME}[llama]",),
    ),
    Fault(
        name="encoders-are-let-in",
        stands_for="A model with an encoder is loaded as if it were a decoder.",
        file=f"{BACKEND}/support.py",
        old='    if getattr(config, "is_encoder_decoder", False):',
        new='    if getattr(config, "is_encoder", False):',
        tests=(SUPPORT,),
    ),
    Fault(
        name="chunked-attention-is-taken-for-full",
        stands_for="Layers that see chunks are served as if they saw everything.",
        file=f"{BACKEND}/support.py",
        old="    others = sorted(kinds - _ATTENTION_TYPES)\n    if others or",
        new="    others: list[str] = []\n    if others and",
        tests=(SUPPORT,),
    ),
    Fault(
        name="longrope-goes-on",
        stands_for="A context passes the place where longrope changes the frequencies of keys that are in the cache.",
        file="engine/kvwatch_engine/model/decoder_config.py",
        old='    if rope.get("rope_type") == "longrope":\n',
        new='    if rope.get("rope_type") == "su":\n',
        tests=(f"{GENERAL}::test_a_context_ends_where_longrope_would_change_its_frequencies",),
    ),
    Fault(
        name="left-over-weights-are-ignored",
        stands_for="A checkpoint with biases that the model does not add is served without them.",
        file=f"{BACKEND}/load.py",
        old='report["unexpected_keys"]',
        new="()",
        tests=(f"{GENERAL}::test_weights_that_do_not_fit_are_refused",),
    ),
    Fault(
        name="an-adapters-name-may-be-the-models",
        stands_for="A name is served twice, and whoever asks for it gets one of both.",
        file="engine/kvwatch_engine/serve/asked.py",
        old="        if name in adapters:\n",
        new="        if name in names and not names:\n",
        tests=(NAMES,),
    ),
    Fault(
        name="further-names-are-unknown",
        stands_for="A model is listed under all its names, and found under the first only.",
        file="engine/kvwatch_engine/server/models.py",
        old="        return name in self.base.names\n",
        new="        return name == self.base.name\n",
        tests=("tests/integration/test_serve_options.py::test_every_name_is_served_and_the_first_is_that_of_answers",),
    ),
    Fault(
        name="the-given-template-is-ignored",
        stands_for="Prompts are made by the template in the tokenizer's folder, though another was given.",
        file="engine/kvwatch_engine/server/tokenizer.py",
        old="        if chat_template is not None:\n",
        new="        if chat_template is not None and not loaded.chat_template:\n",
        tests=(
            "tests/integration/test_serve_options.py"
            "::test_prompts_are_what_the_given_template_and_tokenizer_make_of_messages",
        ),
    ),
)
