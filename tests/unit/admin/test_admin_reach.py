"""Whether an engine is reached, and since when."""

from kvwatch.admin.reach import Reach, ReachObserver, ReachState


class Engine:
    """Is reached or not, at a time that is told."""

    def __init__(self, *, is_up: bool) -> None:
        self.is_up = is_up
        self.now_ns = 1_000

    def observer(self) -> ReachObserver:
        return ReachObserver(lambda: self.is_up, lambda: self.now_ns)


def test_a_state_begins_when_it_is_first_seen_and_lasts_until_it_changes() -> None:
    engine = Engine(is_up=False)
    observer = engine.observer()

    seen = []
    for is_up in (False, False, True, True, False, False, True):
        engine.now_ns += 100
        engine.is_up = is_up
        seen.append(observer.look())

    never, reached = Reach(ReachState.NEVER, 1_000), Reach(ReachState.REACHED, 1_300)
    lost, back = Reach(ReachState.LOST, 1_500), Reach(ReachState.REACHED, 1_700)
    assert seen == [never, never, reached, reached, lost, lost, back]


def test_an_engine_that_is_there_at_once_was_never_missed() -> None:
    assert Engine(is_up=True).observer().look() == Reach(ReachState.REACHED, 1_000)
