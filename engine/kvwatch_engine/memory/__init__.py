"""Who owns which block, and the tensors behind the blocks.

free_list.py      free blocks in eviction order
block_hash.py     names for the content of a block
block_pool.py     states, reference counts, prefix index; emits block events
block_manager.py  block tables of sequences: prefix hits, growth, forks, copy-on-write
footprint.py      what a request holds, and what of it is shared
kv_cache.py       the tensors (here and in tiers/device.py alone torch is imported)
tiers/            where blocks go that lose their place on the device: host memory, disk
"""
