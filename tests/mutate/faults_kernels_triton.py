"""Deliberate faults of the Triton kernels. The tests run them in Triton's interpreter, in float32 and float16."""

from mutate.fault import Fault

TRITON = "kernels/kvwatch_kernels/triton"
TESTS = "tests/unit/kernels/test_kernels_triton_attention.py"
GRID = f"{TESTS}::test_the_kernel_gives_what_the_reference_gives"
ISOLATION = "tests/unit/kernels/test_kernels_triton_isolation.py"
OFFSETS = "tests/unit/kernels/test_kernels_triton_offsets.py"
STORE = "tests/unit/kernels/test_kernels_triton_store.py"

KERNELS_TRITON = (
    Fault(
        name="triton-query-with-the-outputs-stride",
        stands_for="Wrong stride: queries are taken to be laid out as the output is.",
        file=f"{TRITON}/attention_kernel.py",
        old="query_places = query + token_of_row * query_token_stride",
        new="query_places = query + token_of_row * out_token_stride",
        tests=(f"{TESTS}::test_a_strided_query_and_output_are_right",),
    ),
    Fault(
        name="triton-mask-missing",
        stands_for="Missing mask: tokens behind the query and outside of the window are seen.",
        file=f"{TRITON}/softmax.py",
        old='            scores = tl.where(is_visible, scores, float("-inf"))\n',
        new="            scores = scores\n",
        tests=(f"{ISOLATION}::test_a_later_token_of_the_same_chunk_has_no_effect_on_an_earlier_query",),
    ),
    Fault(
        name="triton-window-one-too-wide",
        stands_for="Missing mask: the sliding window lets one token more through than it has.",
        file=f"{TRITON}/softmax.py",
        old="is_visible &= distances > -WINDOW",
        new="is_visible &= distances >= -WINDOW",
        tests=(f"{ISOLATION}::test_a_token_that_left_the_window_has_no_effect",),
    ),
    Fault(
        name="triton-last-tile-of-one-token",
        stands_for="Off by one in the last block: a context that has one token more than whole tiles loses it.",
        file=f"{TRITON}/attention_kernel.py",
        old="end_tile = last_position // TILE + 1",
        new="end_tile = (last_position + TILE - 1) // TILE",
        tests=(GRID,),
    ),
    Fault(
        name="triton-offset-of-32-bits",
        stands_for="R28: the offset of a block overflows 32 bits.",
        file=f"{TRITON}/softmax.py",
        old="blocks = tl.load(table + tokens // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)",
        new="blocks = tl.load(table + tokens // BLOCK_SIZE, mask=is_read, other=0)",
        tests=(f"{OFFSETS}::test_a_cache_may_be_spread_wide",),
    ),
    Fault(
        name="triton-wrong-head-group",
        stands_for="Wrong head group: the heads that share a KV head are taken to lie apart, not side by side.",
        file=f"{TRITON}/attention_kernel.py",
        old="head_of_row = kv_head * GROUP + rows % GROUP",
        new="head_of_row = kv_head + rows % GROUP * NUM_KV_HEADS",
        tests=(GRID,),
    ),
    Fault(
        name="triton-key-scale-left-out",
        stands_for="Scale left out: quantised keys are used as they are stored.",
        file=f"{TRITON}/softmax.py",
        old="            products *= key_scales[None, :]\n",
        new="            products *= 1.0\n",
        tests=(GRID,),
    ),
    Fault(
        name="triton-value-scale-left-out",
        stands_for="Scale left out: quantised values are used as they are stored.",
        file=f"{TRITON}/softmax.py",
        old="        weights = weights * value_scales[None, :]\n",
        new="        weights = weights * 1.0\n",
        tests=(GRID,),
    ),
    Fault(
        name="triton-nan-multiplied",
        stands_for="R27: what lies in slots outside of the sequence is read and multiplied by a weight of zero.",
        file=f"{TRITON}/softmax.py",
        old="        return tl.load(pointers, mask=is_read[:, None], other=0.0)\n",
        new="        return tl.load(pointers)\n",
        tests=(GRID,),
    ),
    Fault(
        name="triton-nan-of-a-later-token",
        stands_for="R27: a value that one query of a chunk may not see is multiplied by a weight of zero.",
        file=f"{TRITON}/softmax.py",
        old="tl.where(is_finite, values, 0.0)",
        new="values",
        tests=(f"{ISOLATION}::test_a_later_token_of_the_same_chunk_has_no_effect_on_an_earlier_query",),
    ),
    Fault(
        name="triton-tiles-not-rescaled",
        stands_for="Online softmax: what was summed up before a larger score came is not rescaled.",
        file=f"{TRITON}/softmax.py",
        old="        sums = sums * fading[:, None]\n",
        new="        sums = sums * 1.0\n",
        tests=(GRID,),
    ),
    Fault(
        name="triton-splits-not-rescaled",
        stands_for="Split KV: the sums of two splits are added without regard to their largest scores.",
        file=f"{TRITON}/reduce.py",
        old="tl.sum(parts * factors[:, None], 0)",
        new="tl.sum(parts, 0)",
        tests=(GRID,),
    ),
    Fault(
        name="triton-last-split-of-one-token",
        stands_for="Off by one in the last split: the reduction leaves out a split of a single token.",
        file=f"{TRITON}/reduce.py",
        old="end_split = position // SPLIT + 1",
        new="end_split = tl.maximum((position + SPLIT - 1) // SPLIT, 1)",
        tests=(GRID,),
    ),
    Fault(
        name="triton-soft-cap-without-scale",
        stands_for="Scale left out: it is forgotten where there is a soft cap.",
        file=f"{TRITON}/softmax.py",
        old="_tanh(products * (scale / SOFT_CAP))",
        new="_tanh(products / SOFT_CAP)",
        tests=(GRID,),
    ),
    Fault(
        name="triton-store-of-the-wrong-slot",
        stands_for="Off by one in the last block: a token is written one slot too far.",
        file=f"{TRITON}/store_kernel.py",
        old="    offset = slot % BLOCK_SIZE\n",
        new="    offset = (slot + 1) % BLOCK_SIZE\n",
        tests=(f"{STORE}::test_keys_and_values_are_stored_as_the_reference_stores_them",),
    ),
    Fault(
        name="triton-padding-is-stored",
        stands_for="Missing mask: slots of -1 are written too.",
        file=f"{TRITON}/store_kernel.py",
        old="    if slot < 0:\n        return\n",
        new="    if slot < -1:\n        return\n",
        tests=(f"{STORE}::test_keys_and_values_are_stored_as_the_reference_stores_them",),
    ),
    Fault(
        name="triton-ties-round-down",
        stands_for="Quantising: halves are rounded down instead of to even.",
        file=f"{TRITON}/rounding.py",
        old="((rest > half) | ((rest == half) & ((kept & 1) == 1)))",
        new="(rest > half)",
        tests=(f"{STORE}::test_every_kind_of_number_is_quantised_as_the_definition_says",),
    ),
    Fault(
        name="triton-copies-with-the-wrong-stride",
        stands_for="Wrong stride: both sides of a copy are taken to be laid out alike.",
        file=f"{TRITON}/copy_kernel.py",
        old="source + source_block * source_stride + offsets",
        new="source + source_block * words + offsets",
        tests=(f"{STORE}::test_only_blocks_are_copied_not_what_lies_between_them",),
    ),
)
