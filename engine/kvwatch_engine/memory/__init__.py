"""Who owns which block, and the tensors behind the blocks.

free_list.py      free blocks in eviction order
block_hash.py     names for the content of a block
prefix_index.py   which block holds which content
block_columns.py  what is noted of each block
block_pool.py     states and reference counts; emits block events
block_manager.py  block tables of sequences: prefix hits, growth, forks, copy-on-write
footprint.py      what a request holds, and what of it is shared
kv_cache.py       the tensors (here and in tiers/device.py alone torch is imported)
tiers/            where blocks go that lose their place on the device: host memory, disk
"""
