"""A reset of the prefix cache with tiers behind the device: all of them forget, and say how much."""

from builders import NullModel, Recorder, make_core, make_request, run_until_idle
from slot_store import SlotStore

from kvwatch.telemetry.events import RequestAdmitted
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.core import EngineCore
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings
from kvwatch_engine.prefixes import PrefixDesk

PROMPT = list(range(4, 21))
"""17 tokens: four full blocks of 4."""
IDENTITY = StoreIdentity(
    weights_fingerprint="w", kv_dtype="int64", block_size=4, num_layers=1, num_kv_heads=1, head_dim=1
)


def ask(core: EngineCore, name: str, prompt: list[int]) -> None:
    core.add(make_request(name, prompt, max_tokens=1), 0)
    run_until_idle(core, 100_000)


def found(recorder: Recorder) -> int:
    """Return how many tokens the last admitted request found, wherever they were."""
    last = [event for event in recorder.drain() if isinstance(event, RequestAdmitted)][-1]
    return last.hit_tokens + last.host_hit_tokens


def test_the_host_forgets_as_the_device_does_and_the_answer_counts_both() -> None:
    model, log = NullModel(), EventLog()

    def make_tiers(manager: BlockManager) -> MemoryTiers:
        return MemoryTiers(
            manager, TierSettings(host_bytes=100 * 32), Machine(SlotStore(model)), IDENTITY, 4 * 8, log
        )  # fmt: skip

    core, recorder = make_core(model, log, num_blocks=11, make_tiers=make_tiers), Recorder(log)
    desk = PrefixDesk(core)
    ask(core, "first", PROMPT)
    for number in range(6):
        ask(core, f"filler{number}", [number, *range(29, 45)])
    ask(core, "again", PROMPT)
    assert found(recorder) == 16, "the host has kept it"
    assert core.tiers is not None
    num_in_host = sum(content is not None for content in core.tiers.states()[0].hashes)
    num_cached = core.manager.pool.num_cached

    reset = desk.reset(unpin=False, actor="test", reason="")

    assert reset.num_cleared == {"device": num_cached, "host": num_in_host}
    assert num_in_host > 0
    assert desk.num_in_use(reset) == 0
    ask(core, "later", PROMPT)
    assert found(recorder) == 0
    core.check_integrity()
    core.close()
