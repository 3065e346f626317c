"""Deliberate faults of the compiled CPU kernels."""

from mutate.fault import Fault

CPU = "kernels/kvwatch_kernels/cpu"
TESTS = "tests/unit/kernels"
WHOLE = "tests/integration/test_whole_forward.py"
QUANTISED_TRUTH = (
    f"{TESTS}/test_kernels_attention_quantised.py::test_a_mixed_batch_equals_naive_attention_on_what_is_stored"
)

KERNELS_CPU = (
    Fault(
        name="values-with-the-keys-stride",
        stands_for="Wrong stride: K and V are taken to be laid out alike.",
        file=f"{CPU}/packing.py",
        old="value_block = read(params, KEY_BLOCK_BYTES), read(params, VALUE_BLOCK_BYTES)",
        new="value_block = read(params, KEY_BLOCK_BYTES), read(params, KEY_BLOCK_BYTES)",
        tests=(f"{TESTS}/test_kernels_attention_truth.py::test_caches_may_be_strided_in_any_dim_but_the_last",),
    ),
    Fault(
        name="query-token-stride",
        stands_for="Wrong stride: queries are taken to be contiguous, though they are a slice of a projection.",
        file=f"{CPU}/tiles.py",
        old="    return (tile.first_token + query) * token_stride + head * head_stride",
        new="    return (tile.first_token + query) * head_stride + head * head_stride",
        tests=(f"{TESTS}/test_kernels_attention_truth.py::test_a_mixed_batch_equals_naive_attention",),
    ),
    Fault(
        name="causal-mask-one-too-wide",
        stands_for="Missing mask: a query sees the token behind its own.",
        file=f"{CPU}/tiles.py",
        old="min(position + 1 - first, TILE)",
        new="min(position + 2 - first, TILE)",
        tests=(
            f"{TESTS}/test_kernels_attention_isolation.py"
            "::test_a_later_token_of_the_same_chunk_has_no_effect_on_an_earlier_query",
        ),
    ),
    Fault(
        name="own-token-hidden",
        stands_for="Off by one in the last block: a query does not see its own token.",
        file=f"{CPU}/tiles.py",
        old="min(position + 1 - first, TILE)",
        new="min(position - first, TILE)",
        tests=(f"{TESTS}/test_kernels_attention_truth.py::test_a_mixed_batch_equals_naive_attention",),
    ),
    Fault(
        name="window-one-too-wide",
        stands_for="Missing mask: the sliding window lets one token more through than it has.",
        file=f"{CPU}/items.py",
        old="position -= read(params, WINDOW) - 1",
        new="position -= read(params, WINDOW)",
        tests=(f"{TESTS}/test_kernels_attention_isolation.py::test_a_token_that_left_the_window_has_no_effect",),
    ),
    Fault(
        name="mask-added-not-selected",
        stands_for="R27: a hidden score that is NaN stays NaN when the mask is added to it.",
        file=f"{CPU}/softmax.py",
        old="select(mask, load(advance(scores, first_lane)), splat(_NOTHING_SEEN))",
        new="load(advance(scores, first_lane)) + select(mask, splat(np.float32(0.0)), splat(_NOTHING_SEEN))",
        tests=(
            f"{TESTS}/test_kernels_attention_isolation.py"
            "::test_a_later_token_of_the_same_chunk_has_no_effect_on_an_earlier_query",
        ),
    ),
    Fault(
        name="old-scratch-shown",
        stands_for="A row whose every score is -inf shows what the thread computed before.",
        file=f"{CPU}/tiles.py",
        old="total if total != np.float32(0.0) else np.float32(np.nan)",
        new="total if total != np.float32(0.0) else np.float32(1.0)",
        tests=(
            f"{TESTS}/test_kernels_attention_isolation.py::test_where_every_score_is_minus_infinity_the_output_is_nan",
        ),
    ),
    Fault(
        name="partial-block-begins-at-slot-0",
        stands_for="Off by one in a block: a tile that begins within a block reads it from its first slot.",
        file=f"{CPU}/packing.py",
        old="    index = first // block_size\n    offset = first - index * block_size\n"
        "    row = 0\n    while row < count:\n        block = block_at(params, table, index)\n",
        new="    index = first // block_size\n    offset = 0\n"
        "    row = 0\n    while row < count:\n        block = block_at(params, table, index)\n",
        tests=(f"{TESTS}/test_kernels_attention_bits.py::test_the_block_size_changes_no_bit",),
    ),
    Fault(
        name="key-offset-of-32-bits",
        stands_for="R28: the offset of a block overflows 32 bits.",
        file=f"{CPU}/packing.py",
        old="key_base + block * key_block + offset * key_token",
        new="key_base + ((block * key_block) & 0x7FFFFFFF) + offset * key_token",
        tests=(f"{TESTS}/test_kernels_attention_isolation.py::test_offsets_past_two_to_the_31_elements_are_right",),
    ),
    Fault(
        name="store-offset-of-32-bits",
        stands_for="R28: the place of a slot overflows 32 bits.",
        file=f"{CPU}/store.py",
        old="    target += offset * read(params, side + _CACHE_TOKEN)\n    row_bytes",
        new="    target += offset * read(params, side + _CACHE_TOKEN)\n"
        "    target -= block * read(params, side + _CACHE_BLOCK) & ~0x7FFFFFFF\n    row_bytes",
        tests=(f"{TESTS}/test_kernels_kv_store.py::test_slots_past_two_to_the_31_elements_are_reached",),
    ),
    Fault(
        name="wrong-head-group",
        stands_for="Wrong head group: two groups of query heads read the same KV head.",
        file=f"{CPU}/packing.py",
        old="read(params, KEY_CACHE) + head * read(params, KEY_HEAD_BYTES)",
        new="read(params, KEY_CACHE) + head // 2 * read(params, KEY_HEAD_BYTES)",
        tests=(f"{TESTS}/test_kernels_attention_truth.py::test_a_mixed_batch_equals_naive_attention",),
    ),
    Fault(
        name="scale-left-out",
        stands_for="The scale of the scores is left out.",
        file=f"{CPU}/tiles.py",
        old="load(advance(target, offset)) * scale)",
        new="load(advance(target, offset)) * splat(np.float32(1.0)))",
        tests=(f"{TESTS}/test_kernels_attention_truth.py::test_a_mixed_batch_equals_naive_attention",),
    ),
    Fault(
        name="tiles-not-rescaled",
        stands_for="Online softmax: what was summed up before a larger score came is not rescaled.",
        file=f"{CPU}/softmax.py",
        old="    write(rescale, 0, factor)",
        new="    write(rescale, 0, _ONE)",
        tests=(f"{TESTS}/test_kernels_attention_truth.py::test_huge_and_tiny_scores_neither_overflow_nor_vanish",),
    ),
    Fault(
        name="splits-not-rescaled",
        stands_for="Split KV: the sums of two splits are added without regard to their largest scores.",
        file=f"{CPU}/softmax.py",
        old="added if is_first else old * keep + added",
        new="added if is_first else old + added",
        tests=(f"{TESTS}/test_kernels_attention_truth.py::test_a_mixed_batch_equals_naive_attention",),
    ),
    Fault(
        name="blocks-taken-to-be-adjacent",
        stands_for="Wrong stride: blocks are copied as if one began where the other ends.",
        file=f"{CPU}/copy.py",
        old="read(source_blocks, item) * read(params, _SOURCE_STRIDE)",
        new="read(source_blocks, item) * read(params, _BLOCK_BYTES)",
        tests=(f"{TESTS}/test_kernels_block_copy.py::test_blocks_may_lie_apart_from_each_other",),
    ),
    Fault(
        name="rotated-the-wrong-way",
        stands_for="A sign of the rotation is lost.",
        file=f"{CPU}/rotary.py",
        old="store(advance(target, offset), fma(second, zero - sines, rounded_like(head, first * cosines)))",
        new="store(advance(target, offset), fma(second, sines, rounded_like(head, first * cosines)))",
        tests=(f"{TESTS}/test_kernels_rotary.py::test_queries_and_cache_hold_what_plain_operations_give",),
    ),
    Fault(
        name="key-scale-left-out",
        stands_for="Scale left out: quantised keys are used as they are stored.",
        file=f"{CPU}/tiles.py",
        old="        if has_scales:\n            multiply_row(scores, scratch.scales)\n",
        new="",
        tests=(QUANTISED_TRUTH,),
    ),
    Fault(
        name="value-scale-left-out",
        stands_for="Scale left out: quantised values are used as they are stored.",
        file=f"{CPU}/tiles.py",
        old="            multiply_row(scores, advance(scratch.scales, TILE + LANES))\n",
        new="            pass\n",
        tests=(QUANTISED_TRUTH,),
    ),
    Fault(
        name="bias-from-the-tile",
        stands_for="The position bias counts positions from the tile instead of from the query.",
        file=f"{CPU}/scores.py",
        old="distances = lane_numbers() + splat(np.float32(distance + lane))",
        new="distances = lane_numbers() + splat(np.float32(lane))",
        tests=(f"{TESTS}/test_kernels_attention_quantised.py::test_cap_bias_and_window_apply_in_their_order",),
    ),
    Fault(
        name="nan-made-a-number-by-quantising",
        stands_for="A token that is not finite gets a scale, and reads as plausible numbers.",
        file=f"{CPU}/quantise.py",
        old="write(scale_target, 0, scale if is_finite else np.float32(np.nan))",
        new="write(scale_target, 0, scale if is_finite else _ZERO)",
        tests=(f"{TESTS}/test_kernels_quant.py::test_kv_store_gives_the_definitions_bits",),
    ),
    Fault(
        name="the-strip-has-no-registers",
        stands_for="A product is cut as if one step of its strip needed no registers, and spills its sums.",
        file=f"{CPU}/registers.py",
        old="max(fitting - 1, 1)",
        new="fitting",
        tests=(f"{TESTS}/test_kernels_product_code.py::test_parts_cover_a_product_once_and_fit",),
    ),
    Fault(
        name="threads-do-not-wait",
        stands_for="In a program a thread begins the next call while others are still at the one before.",
        file=f"{CPU}/program.py",
        old="            wait_for_all(params, (index + 1) * num_threads, member, num_threads)\n",
        new="            pass\n",
        tests=(f"{WHOLE}::test_threads_wait_for_each_other_between_two_calls",),
    ),
    Fault(
        name="threads-share-a-core",
        stands_for="Two threads that wait for each other stay on one core while another one is free.",
        file=f"{CPU}/places.py",
        old="            is_shared = True\n",
        new="            is_shared = False\n",
        tests=(
            f"{TESTS}/test_kernels_cpu_places.py::test_who_shares_a_core_with_another_of_the_team_goes_elsewhere_and_may_come_back",
        ),
    ),
    Fault(
        name="layers-share-their-counters",
        stands_for="The second layer's attention finds all work items taken.",
        file="kernels/kvwatch_kernels/forward.py",
        old="counters.strides[0] * np.arange(len(places))",
        new="0 * np.arange(len(places))",
        tests=(f"{WHOLE}::test_the_same_bits_in_every_step",),
    ),
    Fault(
        name="the-residual-is-forgotten",
        stands_for="What a layer's MLP gives is not added to the hidden states of the next.",
        file="kernels/kvwatch_kernels/forward.py",
        old="None if is_first else self.added",
        new="None",
        tests=(f"{WHOLE}::test_the_same_bits_in_every_step",),
    ),
    Fault(
        name="slots-of-the-last-step",
        stands_for="Keys and values are written where those of the step before were.",
        file="kernels/kvwatch_kernels/forward.py",
        old="                params[places] = slots[group].slots.ctypes.data\n",
        new="                pass\n",
        tests=(f"{WHOLE}::test_the_same_bits_in_every_step",),
    ),
    Fault(
        name="pairs-of-rows",
        stands_for="Rows of pairs are taken to lie twice as far apart as they do.",
        file=f"{CPU}/linear.py",
        old="x_stride // 2 if is_paired else x_stride",
        new="x_stride",
        tests=(f"{TESTS}/test_kernels_linear.py::test_pairs_of_any_size_give_the_product",),
    ),
    Fault(
        name="the-last-of-equals",
        stands_for="Of equally likely tokens that lie in different lanes a later one is chosen.",
        file=f"{CPU}/largest.py",
        old="(value == largest and at < found)",
        new="(value == largest and at > found)",
        tests=(f"{TESTS}/test_kernels_largest.py::test_the_first_of_the_largest_is_found",),
    ),
    Fault(
        name="rows-beyond-a-table",
        stands_for="A position that the table of angles does not have reads whatever lies behind it.",
        file=f"{CPU}/gather.py",
        old="if index < 0 or index >= read(params, _TABLE_ROWS):",
        new="if index >= read(params, _TABLE_ROWS):",
        tests=(f"{WHOLE}::test_a_row_that_a_table_does_not_have_is_told_and_the_next_step_is_right",),
    ),
    Fault(
        name="scores-of-pairs-unscaled",
        stands_for="Scores that are made of pairs are not multiplied by the scale.",
        file=f"{CPU}/tiles.py",
        old="store(advance(scores, offset), load(advance(scores, offset)) * factor)",
        new="store(advance(scores, offset), load(advance(scores, offset)))",
        tests=(f"{TESTS}/test_kernels_attention_truth.py::test_a_mixed_batch_equals_naive_attention",),
    ),
    Fault(
        name="the-pace-learns-nothing",
        stands_for="Prompts beside decoding sequences are computed in steps as large as they can be.",
        file="engine/kvwatch_engine/scheduling/scheduler.py",
        old="        self._pace.note_step(scheduled.input.num_tokens, result.forward_ns * 1e-9)\n",
        new="",
        tests=(
            "tests/unit/engine/test_engine_prefill_pace.py"
            "::test_prompts_are_cut_so_that_those_who_decode_get_their_tokens_in_time",
        ),
    ),
)
