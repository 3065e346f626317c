"""KV groups on the wire: each hash in its group, with the attention that the group has."""

from builders import NullModel, Recorder, make_core, make_groups, make_request, run_until_idle

from kvwatch.exporters.kv_events.translator import Translator
from kvwatch.telemetry.events.block import GROUPS
from kvwatch.telemetry.log import EventLog
from kvwatch.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from kvwatch_engine.core import EngineCore


def resident(core: EngineCore) -> set[tuple[int, bytes]]:
    pool = core.manager.pool
    return {(pool.groups[block], content) for block, content in enumerate(pool.hashes) if content is not None}


def told(translator: Translator) -> set[tuple[int, bytes]]:
    return {(key.group, bytes(key.content)) for key in translator.residency if isinstance(key.content, bytes)}


def test_what_is_resident_is_told_in_its_group_with_its_attention() -> None:
    log = EventLog()
    core = make_core(NullModel(), log, num_blocks=26, groups=make_groups(None, 6))
    recorder, translator = Recorder(log), Translator("bytes")
    translator.load(core.snapshot())
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        core.add(make_request(name, [token] * 20, max_tokens=8, ignore_eos=True), 0)
        run_until_idle(core)

    events = [wire for event in recorder.drain() for wire in translator.apply(event)]

    stored = [event for event in events if isinstance(event, BlockStored)]
    kinds = {(event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in stored}
    assert kinds == {(0, "full_attention", None), (1, "sliding_window", 6)}
    assert {event.group_idx for event in events if isinstance(event, BlockRemoved)} == {0, 1}, "some were evicted"
    assert told(translator) == resident(core)

    late = Translator("bytes")
    first, *rest = late.load(core.snapshot())
    assert isinstance(first, AllBlocksCleared)
    assert told(late) == resident(core)
    assert {event.kv_cache_spec_kind for event in rest if isinstance(event, BlockStored)} == {
        "full_attention",
        "sliding_window",
    }
    assert all(GROUPS[event.group_idx or 0] in ("0", "1") for event in rest if isinstance(event, BlockStored))
