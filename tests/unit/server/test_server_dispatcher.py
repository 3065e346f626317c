import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvwatch_engine.contracts.request import SequenceOutput
from kvwatch_engine.server.dispatcher import Mailbox, OutputDispatcher
from kvwatch_engine.server.errors import ClientGone


def output(request_id: str, *token_ids: int) -> SequenceOutput:
    return SequenceOutput(request_id=request_id, sequence=0, token_ids=token_ids)


def on_another_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(5)


def make_mailbox(max_unread_tokens: int = 100, on_overflow: Callable[[], None] = lambda: None) -> Mailbox:
    return Mailbox(max_unread_tokens, on_overflow)


def test_a_step_crosses_threads_once_and_reaches_every_mailbox_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        crossings: list[object] = []
        cross = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *args: object) -> asyncio.Handle:
            crossings.append(callback)
            return cross(callback, *args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        dispatcher = OutputDispatcher()
        boxes = {name: make_mailbox() for name in ("a", "b")}
        for name, box in boxes.items():
            dispatcher.open(name, box)
        step = [output("a", 1), output("b", 2), output("a", 3), output("nobody", 4)]

        on_another_thread(lambda: dispatcher(step))

        assert await boxes["a"].get(1) == [step[0], step[2]]
        assert await boxes["b"].get(1) == [step[1]]
        assert len(crossings) == 1

    asyncio.run(scenario())


def test_a_reader_that_was_away_finds_several_steps_at_once() -> None:
    async def scenario() -> None:
        dispatcher, box = OutputDispatcher(), make_mailbox()
        dispatcher.open("a", box)
        for token in range(5):
            dispatcher([output("a", token)])
        await asyncio.sleep(0)

        assert [item.token_ids for item in await box.get(1)] == [(token,) for token in range(5)]
        assert await box.get(0.01) == []

    asyncio.run(scenario())


def test_a_closed_request_gets_nothing_and_costs_nothing() -> None:
    async def scenario() -> None:
        dispatcher, box = OutputDispatcher(), make_mailbox()
        dispatcher.open("a", box)
        dispatcher.close("a")
        dispatcher.close("a")
        dispatcher([output("a", 1)])
        await asyncio.sleep(0)

        assert await box.get(0.01) == []
        assert dispatcher.num_open == 0

    asyncio.run(scenario())


def test_the_engine_may_go_on_after_the_loop_is_closed() -> None:
    dispatcher = OutputDispatcher()

    async def scenario() -> None:
        dispatcher.open("a", make_mailbox())

    dispatcher([output("a", 1)])  # before there is a loop
    asyncio.run(scenario())
    dispatcher([output("a", 1)])
    dispatcher([output("a", 1)])


def test_a_reader_that_waits_is_woken_by_a_hang_up() -> None:
    async def scenario() -> None:
        box = make_mailbox()
        reader = asyncio.create_task(box.get(60))
        await asyncio.sleep(0)
        box.hang_up("the client hung up")

        with pytest.raises(ClientGone, match="hung up"):
            await reader
        with pytest.raises(ClientGone):
            await box.get(60)

    asyncio.run(scenario())


def test_tokens_that_nobody_reads_are_dropped_at_the_limit_and_reported_once() -> None:
    async def scenario() -> None:
        overflows: list[str] = []
        box = make_mailbox(10, lambda: overflows.append("full"))
        for token in range(1000):
            box.put(output("a", token))

        assert overflows == ["full"]
        with pytest.raises(ClientGone, match="more than 10 tokens unread"):
            await box.get(60)

    asyncio.run(scenario())


def test_reading_in_time_is_no_overflow() -> None:
    async def scenario() -> None:
        box = make_mailbox(10)
        for token in range(100):
            box.put(output("a", token))
            assert len(await box.get(1)) == 1

    asyncio.run(scenario())


def test_sequences_that_come_as_a_whole_are_not_held_against_a_client_that_could_not_read_before() -> None:
    async def scenario() -> None:
        box = make_mailbox(max_unread_tokens=8)
        found = [replace(output("a", *range(50)), score=-1.0) for _ in range(4)]
        for each in found:
            box.put(each)

        assert await box.get(1) == found

    asyncio.run(scenario())


def test_what_is_taken_while_the_reader_waits_does_not_wake_it_up_and_the_order_stays() -> None:
    async def scenario() -> None:
        box = make_mailbox()
        taken: list[SequenceOutput] = []
        is_free = True

        def taker(found: SequenceOutput) -> bool:
            if is_free:
                taken.append(found)
            return is_free

        box.taker = taker
        items = [output("a", token) for token in range(6)]
        box.put(items[0])  # nobody waits for it yet
        assert await box.get(60) == items[:1]

        reader = asyncio.create_task(box.get(60))
        await asyncio.sleep(0)
        box.put(items[1])
        box.put(items[2])
        await asyncio.sleep(0)
        assert not reader.done()
        is_free = False
        box.put(items[3])
        is_free = True
        box.put(items[4])  # behind one that the reader has still to read
        assert await reader == items[3:5]
        box.close()
        box.put(items[5])
        assert taken == items[1:3]
        assert await box.get(60) == items[5:]

    asyncio.run(scenario())


def test_what_a_taker_raises_is_its_readers_and_nobody_elses() -> None:
    async def scenario() -> None:
        def broken(_found: SequenceOutput) -> bool:
            raise ValueError("a defect")

        dispatcher = OutputDispatcher()
        boxes = {name: make_mailbox() for name in ("a", "b")}
        boxes["a"].taker = broken
        for name, box in boxes.items():
            dispatcher.open(name, box)
        readers = [asyncio.create_task(box.get(60)) for box in boxes.values()]
        await asyncio.sleep(0)
        dispatcher([output("a", 1), output("b", 2)])

        assert [item.token_ids for item in await readers[1]] == [(2,)]
        with pytest.raises(ValueError, match="a defect"):
            await readers[0]

    asyncio.run(scenario())


def test_silence_is_counted_from_what_was_taken_last() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        box = make_mailbox()
        box.taker = lambda _found: True
        last = 0.0
        reader = asyncio.create_task(box.get(0.3))
        for token in range(8):
            await asyncio.sleep(0.1)
            if reader.done():
                break  # this machine was stopped for longer than the silence
            last = loop.time()
            box.put(output("a", token))

        assert await reader == []
        assert loop.time() - last >= 0.29

    asyncio.run(scenario())
