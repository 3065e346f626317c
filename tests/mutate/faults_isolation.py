"""Deliberate faults of who shares what: keys of block hashes, API keys, pins, the reset of the prefix cache."""

from mutate.fault import Fault

MACHINE = "tests/property/test_isolation.py::test_blocks_are_shared_exactly_between_those_who_agree_in_every_key"
HASH = "tests/unit/memory/test_memory_block_hash.py"
RESPONSES = "tests/integration/test_responses_limits.py"
KEYS = "tests/unit/server/test_server_api_keys.py"
HTTP = "tests/integration/test_api_keys.py"
LIVE = "tests/unit/live/test_live_prefixes.py"
SHARING = "tests/unit/engine/test_engine_sharing.py"
SALTS = f"{SHARING}::test_different_salts_never_share_a_block_and_equal_ones_do"
PRESSURE = "tests/unit/engine/test_engine_pressure.py"
STRICT = "tests/unit/engine/test_engine_strict.py"
POOL = "engine/kvwatch_engine/memory/block_pool.py"
BLOCK_HASH = "engine/kvwatch_engine/memory/block_hash.py"

ISOLATION = (
    Fault(
        name="kinds-of-key-are-not-told-apart",
        stands_for="A client sends another tenant's salt as its own, and finds the other's blocks.",
        file=BLOCK_HASH,
        old='        return struct.pack("<BQ", self.tag, len(self.content)) + self.content\n',
        new='        return struct.pack("<BQ", 0, len(self.content)) + self.content\n',
        tests=(MACHINE, HASH),
    ),
    Fault(
        name="an-image-anywhere-in-the-block",
        stands_for="Two prompts have the same image at different places, and the one is given the other's K/V.",
        file=BLOCK_HASH,
        old='        place = struct.pack("<qq", self.position - start, self.num_tokens)\n',
        new='        place = struct.pack("<qq", 0, self.num_tokens)\n',
        tests=(MACHINE, HASH),
    ),
    Fault(
        name="a-header-says-whose-request-it-is",
        stands_for="Anybody with a key has his requests counted as another tenant's.",
        file="engine/kvwatch_engine/server/endpoint.py",
        old="        tenant = caller.tenant if caller is not None else",
        new="        tenant = caller.tenant if caller is None else",
        tests=(HTTP,),
    ),
    Fault(
        name="responses-are-everybodys",
        stands_for="Who knows or guesses the id of a response reads what somebody else has asked.",
        file="engine/kvwatch_engine/server/responses/store.py",
        old="        return found if found is not None and found.owner == owner else None\n",
        new="        return found\n",
        tests=(
            "tests/property/test_response_store.py",
            f"{RESPONSES}::test_only_the_key_that_made_a_response_finds_it",
        ),
    ),
    Fault(
        name="dropped-responses-stay-in-memory",
        stands_for="The conversations of responses that were dropped are counted no more, and grow for ever.",
        file="engine/kvwatch_engine/server/responses/store.py",
        old="                    del self._items[node.owner, item.id]\n",
        new="                    pass\n",
        tests=("tests/property/test_response_store.py",),
    ),
    Fault(
        name="the-tenant-shares-with-everybody",
        stands_for="The key says whose request it is, and the blocks are everybody's.",
        file="engine/kvwatch_engine/server/generation.py",
        old="                tenant_salt=self.tenant_salt,\n",
        new="",
        tests=(HTTP,),
    ),
    Fault(
        name="a-key-that-was-taken-out-lives-on",
        stands_for="Somebody takes a key out of the file and makes a mistake elsewhere in it: the key still works.",
        file="engine/kvwatch_engine/server/api_keys.py",
        old="            self._known, self._salts = (), {}\n",
        new="            pass\n",
        tests=(KEYS,),
    ),
    Fault(
        name="pinned-blocks-are-evicted",
        stands_for="A system prompt is pinned, and gone after a busy night.",
        file=POOL,
        old="            elif pinned and content in pinned:\n",
        new="            elif False:\n",
        tests=(LIVE,),
    ),
    Fault(
        name="pins-leave-no-room-to-end",
        stands_for="A prefix is pinned beside a request that then waits for ever for the blocks that are left.",
        file="engine/kvwatch_engine/prefixes.py",
        old="        check_worst_cases(wanted, accepted)\n",
        new="",
        tests=(LIVE,),
    ),
    Fault(
        name="requests-are-measured-by-the-whole-pool",
        stands_for="A request is accepted that needs the pinned blocks, and never ends.",
        file="engine/kvwatch_engine/contracts/settings.py",
        old="        return self.num_blocks - 1 - self.num_pinned_blocks\n",
        new="        return self.num_blocks - 1\n",
        tests=(LIVE,),
    ),
    Fault(
        name="what-runs-brings-the-cache-back",
        stands_for="The cache was reset, and a running request stores what it goes on with under the old names.",
        file="engine/kvwatch_engine/prefixes.py",
        old="                request.isolate()\n",
        new="                pass\n",
        tests=(LIVE,),
    ),
    Fault(
        name="a-found-block-is-trusted",
        stands_for="Strict mode compares nothing.",
        file="engine/kvwatch_engine/memory/strict.py",
        old="                return index\n",
        new="                continue\n",
        tests=(STRICT,),
    ),
    Fault(
        name="a-salt-that-no-hash-knows",
        stands_for="`cache_salt` is read from the request and left out of the block hashes.",
        file="engine/kvwatch_engine/core.py",
        old="                cache_salt=cache_salt,\n",
        new='                cache_salt="",\n',
        tests=(SALTS,),
    ),
    Fault(
        name="a-salt-stands-for-the-tenant-too",
        stands_for="A request with a salt of its own leaves its tenant's out: who guesses the salt finds its blocks.",
        file=BLOCK_HASH,
        old="    if tenant_salt:\n        keys.append(",
        new="    if tenant_salt and not cache_salt:\n        keys.append(",
        tests=(MACHINE, HASH),
    ),
    Fault(
        name="keys-run-into-each-other",
        stands_for="Keys are joined without their lengths: one that ends like the next begins is taken for two.",
        file=BLOCK_HASH,
        old='        return struct.pack("<BQ", self.tag, len(self.content)) + self.content\n',
        new='        return struct.pack("<B", self.tag) + self.content\n',
        tests=(HASH,),
    ),
    Fault(
        name="images-before-a-block-are-forgotten",
        stands_for="A block's hash has its own images' keys, but no parent: an image before it makes no difference.",
        file=BLOCK_HASH,
        old="block_hash(parent, token_ids[at : at + size], self._keys_in(start, start + size))",
        new="block_hash(self._root, token_ids[at : at + size], self._keys_in(start, start + size))",
        tests=(MACHINE, HASH),
    ),
    Fault(
        name="the-second-of-equals-takes-the-name",
        stands_for="A duplicate takes over the name of the block that was stored first, which nobody finds any more.",
        file="engine/kvwatch_engine/memory/prefix_index.py",
        old="            if content in index:\n                duplicates",
        new="            if content in index and place > 1000:\n                duplicates",
        tests=(MACHINE,),
    ),
    Fault(
        name="the-head-of-a-chain-goes-first",
        stands_for="A sequence releases its first block first: a prefix is evicted before its continuations.",
        file="engine/kvwatch_engine/memory/group_tables.py",
        old="        table.reverse()\n",
        new="        pass\n",
        tests=(f"{PRESSURE}::test_blocks_are_evicted_only_on_demand_oldest_first_and_the_tail_before_the_head",),
    ),
    Fault(
        name="a-whole-prompt-is-found",
        stands_for="A prompt of whole blocks is found to its last token, and there are no logits to go on from.",
        file="engine/kvwatch_engine/scheduling/admission.py",
        old="        num_blocks = (num_tokens - 1) // self._manager.block_size\n",
        new="        num_blocks = num_tokens // self._manager.block_size\n",
        tests=(f"{SHARING}::test_a_repeated_prompt_hits_all_full_blocks_but_never_its_last_token",),
    ),
)
