import asyncio

import pytest

from kvwatch_engine.contracts.errors import EngineOverloaded
from kvwatch_engine.server import Drain


def test_a_drain_refuses_new_requests_and_waits_for_running_ones() -> None:
    async def scenario() -> None:
        drain = Drain(retry_after_seconds=7)
        with drain.running():
            drain.begin_drain()
            with pytest.raises(EngineOverloaded) as caught, drain.running():
                pass
            assert (caught.value.reason, caught.value.retry_after_seconds) == ("draining", 7)
            assert not await drain.wait_idle(0.05)
        assert await drain.wait_idle(0)
        assert drain.is_draining

    asyncio.run(scenario())


def test_a_request_that_fails_is_no_longer_running() -> None:
    drain = Drain(retry_after_seconds=1)

    with pytest.raises(ValueError, match="broken"), drain.running():
        raise ValueError("broken")

    assert drain.num_running == 0
