"""Names for the two identities of a block: where it lies, and what it holds."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a physical block, 0 to num_blocks - 1."""

BlockHash = NewType("BlockHash", bytes)
"""sha256 over the parent's hash, the block's tokens and its extra keys: names the whole prefix up to its end."""

NULL_BLOCK = BlockId(0)
"""Reserved block that pads block tables; never allocated, hashed or released."""

PAD_SLOT = -1
"""Entry of a slot mapping whose token is not written. Only at the tensor boundary."""
