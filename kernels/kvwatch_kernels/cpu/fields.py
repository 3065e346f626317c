"""What the host hands to the compiled attention code: one array of 64-bit integers, with a name for each place.

One array keeps a call cheap (no unboxing of a dozen tensors) and lets every thread of the pool read the same arguments.
Addresses are in bytes, strides in elements unless the name says otherwise.
"""

(
    QUERY,  # address of query [num_tokens, num_heads, head_dim]
    QUERY_TOKEN_STRIDE,
    QUERY_HEAD_STRIDE,
    OUT,  # address of out, same shape
    OUT_TOKEN_STRIDE,
    OUT_HEAD_STRIDE,
    KEY_CACHE,  # address of key_cache [num_blocks, num_kv_heads, block_size, head_dim]
    KEY_BLOCK_BYTES,  # bytes from one block, head, token to the next
    KEY_HEAD_BYTES,
    KEY_TOKEN_BYTES,
    VALUE_CACHE,  # address of value_cache, same shape
    VALUE_BLOCK_BYTES,
    VALUE_HEAD_BYTES,
    VALUE_TOKEN_BYTES,
    KEY_SCALES,  # address of f32[num_blocks, num_kv_heads, block_size]; 0 where the cache is not quantised
    KEY_SCALES_BLOCK_BYTES,  # bytes from one block, head to the next
    KEY_SCALES_HEAD_BYTES,
    VALUE_SCALES,  # the same three for values
    VALUE_SCALES_BLOCK_BYTES,
    VALUE_SCALES_HEAD_BYTES,
    BLOCK_TABLES,  # address of i32[num_seqs, max_blocks]
    MAX_BLOCKS,
    QUERY_STARTS,  # address of i32[num_seqs + 1]
    CONTEXT_LENS,  # address of i32[num_seqs]
    NUM_SEQS,
    NUM_TOKENS,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    GROUP_SIZE,  # query heads that share a KV head
    HEAD_DIM,
    ELEMENT_BYTES,  # of the cache
    QUERY_BYTES,  # of an element of queries and outputs: 4 for float32, 2 for bfloat16
    BLOCK_SIZE,
    WINDOW,  # tokens seen, itself included; more than any context where there is no window
    SCALE,  # the bits of a float32: scale * log2(e)
    SOFT_CAP,  # the bits of a float32: soft cap * log2(e); 0 for none
    ALIBI_SLOPES,  # address of f32[num_heads]; 0 for none
    COUNTERS,  # address of i64[2 + num_seqs * num_kv_heads], zero at the start
    PARTIALS,  # address of f32[partial rows, PARTIAL_HEADER + padded head dim]
    SCRATCH,  # address of the threads' scratch, 64-byte aligned
    SCRATCH_BYTES,  # bytes of scratch of one thread
    TILE_ROWS,  # rows (query token x head of the group) of one query tile, at most
    FAULT,  # out: 0, or what was found wrong
    FAULT_VALUE,  # out: the offending value
    NUM_FIELDS,
) = range(45)

FAULT_QUERY_STARTS, FAULT_CONTEXT_LEN, FAULT_BLOCK_ID = 1, 2, 3

ITEM_COUNTER, THREAD_COUNTER, FIRST_SPLIT_COUNTER = 0, 1, 2
"""Places in COUNTERS: next work item, next thread, then finished splits of each (sequence, KV head)."""
