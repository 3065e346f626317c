"""A sequence holds exactly the blocks that its tokens need, at every step, and what is shared is held once."""

from builders import NullModel, make_core, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwatch_engine.core import EngineCore
from kvwatch_engine.scheduling.policy import worst_case_blocks
from kvwatch_engine.scheduling.request import Request

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=40),
        st.integers(1, 20),  # most new tokens
        st.sampled_from([1, 1, 2, 3]),
        st.integers(0, 30),  # the step before which it arrives
    ),
    min_size=1,
    max_size=8,
)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return (num_tokens + block_size - 1) // block_size


def check_sequences(core: EngineCore) -> None:
    """Compare each table with the tokens that are computed, or, before that, reserved for a prompt."""
    size, manager = core.settings.block_size, core.manager
    for request in core.scheduler.lifecycle.running:
        leader = request.live_sequences()[0]
        for sequence in request.active_sequences():
            computed, reserved = blocks_for(sequence.num_computed, size), blocks_for(sequence.num_tokens, size)
            allowed = {computed}
            if sequence is leader and core.settings.reserve_prompt:
                if not sequence.is_decoding:
                    allowed = {reserved}
                    if request.has_forked and sequence.index > 0:
                        allowed.add(computed)  # a follower whose leader has ended: nothing was reserved for it
                elif request.num_preemptions:
                    allowed.add(reserved)  # it has resumed, and its newest token found no room in the step
            assert len(manager.table(sequence.owner)) in allowed, sequence.owner
        if request.has_forked and len(request.sequences) > 1:
            check_sharing(core, request)


def check_sharing(core: EngineCore, request: Request) -> None:
    """The sequences of one request have the full blocks of its prompt in common, and each the rest alone."""
    size, manager = core.settings.block_size, core.manager
    live = [sequence for sequence in request.live_sequences() if sequence.num_computed > request.num_prompt_tokens]
    full = request.num_prompt_tokens // size
    tables = [manager.table(sequence.owner) for sequence in live]
    if not tables:
        return
    assert {tuple(table[:full]) for table in tables} == {tuple(tables[0][:full])}
    own = [block for table in tables for block in table[full:]]
    assert len(set(own)) == len(own)
    assert len({block for table in tables for block in table}) == full + len(own)


@settings(max_examples=120, deadline=None)
@given(
    requests=REQUESTS,
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    num_blocks=st.integers(20, 80),
    max_batch_tokens=st.integers(8, 60),
    enable_prefix_cache=st.booleans(),
    reserve_prompt=st.booleans(),
    num_speculative_tokens=st.sampled_from([0, 1, 5]),
)
def test_held_blocks_are_what_the_tokens_need(
    requests: list[tuple[list[int], int, int, int]],
    block_size: int,
    num_blocks: int,
    max_batch_tokens: int,
    *,
    enable_prefix_cache: bool,
    reserve_prompt: bool,
    num_speculative_tokens: int,
) -> None:
    model = NullModel()
    model.period = 4
    core = make_core(
        model,
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        enable_prefix_cache=enable_prefix_cache,
        reserve_prompt=reserve_prompt,
        num_speculative_tokens=num_speculative_tokens,
        prompt_lookup_min=1,
    )
    step = 0
    while step <= 30 or core.has_work:
        for index, (prompt, max_tokens, n, arrival) in enumerate(requests):
            if arrival == step and worst_case_blocks(len(prompt), max_tokens, n, block_size) < num_blocks:
                core.add(make_request(f"r{index}", prompt, max_tokens=max_tokens, n=n, ignore_eos=True), step)
        core.step()
        check_sequences(core)
        step += 1
        assert step < 3000, "it does not end"
    assert core.manager.pool.num_used == 0
