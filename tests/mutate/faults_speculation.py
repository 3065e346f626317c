"""Deliberate faults of speculative decoding: what stands, what is taken back, what a draft may take."""

from mutate.fault import Fault

UNIT = "tests/unit/engine/test_engine_speculation.py"
HELD = "tests/property/test_held_blocks.py"
SEARCH = "tests/unit/engine/test_engine_prompt_lookup.py"
BUILDER = "engine/kvwatch_engine/scheduling/step_builder.py"
DRAFTING = "engine/kvwatch_engine/scheduling/drafting.py"
LOOKUP = "engine/kvwatch_engine/scheduling/prompt_lookup.py"
VERIFICATION = "engine/kvwatch_engine/scheduling/verification.py"

SPECULATION = (
    Fault(
        name="a-draft-stands-unverified",
        stands_for="Whatever was guessed becomes the answer.",
        file=VERIFICATION,
        old="place == num_proposed or token != draft.token_ids[place]:",
        new="place == num_proposed:",
        tests=(UNIT,),
    ),
    Fault(
        name="one-token-too-many-stands",
        stands_for="A draft whose first token is rejected goes on with tokens that follow what nobody said.",
        file=VERIFICATION,
        old="or token != draft.token_ids[place]:",
        new="or (place > 0 and token != draft.token_ids[place]):",
        tests=(UNIT,),
    ),
    Fault(
        name="rejected-blocks-stay",
        stands_for="A sequence keeps the blocks of rejected tokens until it ends.",
        file=VERIFICATION,
        old="[] if num_accepted == verified.num_proposed else manager.truncate(sequence.owner, end)",
        new="[]",
        tests=(HELD,),
    ),
    Fault(
        name="rejected-tokens-are-stored",
        stands_for="A block is stored that was written in full, though the end of it was rejected.",
        file=VERIFICATION,
        old="            manager.store_full(sequence.owner, sequence.chain, end, sequence.tokens)\n",
        new="            manager.store_full(\n"
        "                sequence.owner, sequence.chain, start + verified.num_proposed, sequence.tokens\n"
        "            )\n",
        tests=(UNIT,),
    ),
    Fault(
        name="filled-slots-of-rejected-tokens-are-not-told",
        stands_for="The ledger believes that blocks are as full as the step has written them.",
        file="kvwatch/ledger/ledger.py",
        old="            ev.DraftsVerified: self._drafts_verified,\n",
        new="",
        tests=(UNIT,),
    ),
    Fault(
        name="all-rows-draw-the-same-number",
        stands_for="Tokens behind a draft are drawn with the random number of its first position.",
        file=BUILDER,
        old="            position=position,\n            output_token_ids=tokens,\n",
        new="            output_token_ids=tokens,\n",
        tests=(UNIT,),
    ),
    Fault(
        name="end-tokens-are-forbidden-too-long",
        stands_for="Behind a draft `min_tokens` is counted from before it.",
        file=BUILDER,
        old="            forbidden_token_ids=_forbidden(first.params, position, eos_token_ids),\n",
        new="",
        tests=(UNIT,),
    ),
    Fault(
        name="drafts-take-what-others-wait-for",
        stands_for="A draft takes blocks while a request waits for some.",
        file=DRAFTING,
        old="self.settings.watermark_blocks if can_grow else 0",
        new="self.settings.watermark_blocks",
        tests=(UNIT,),
    ),
    Fault(
        name="a-draft-runs-past-max-tokens",
        stands_for="A draft is as long as what is left, and the token behind it is one too many.",
        file=DRAFTING,
        old="num_left - 1, budget.remaining",
        new="num_left + 3, budget.remaining",
        tests=(UNIT,),
    ),
    Fault(
        name="drafts-for-grammars",
        stands_for="A sequence that keeps to a grammar gets a draft, whose rows have the mask of its first position.",
        file=DRAFTING,
        old="request.search is None and sequence.guide is None and not",
        new="request.search is None and not",
        tests=(UNIT,),
    ),
    Fault(
        name="the-first-match-is-taken",
        stands_for="A match further back is taken where a later one has as many tokens behind it.",
        file=LOOKUP,
        old="followed[-1] if len(followed) else ends[0]",
        new="ends[0]",
        tests=(SEARCH,),
    ),
    Fault(
        name="a-step-without-memory-keeps-the-blocks-of-its-drafts",
        stands_for="After a step without memory sequences hold blocks for guesses that nobody will verify.",
        file="engine/kvwatch_engine/scheduling/scheduler.py",
        old="                self._manager.truncate(chunk.sequence.owner, chunk.end)\n",
        new="                pass\n",
        tests=(UNIT,),
    ),
)
