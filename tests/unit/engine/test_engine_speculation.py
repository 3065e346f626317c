"""Drafts change how many steps an answer takes, and nothing else: neither answers nor what is held between steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from builders import LedgerFollower, NullModel, Recorder, make_core, make_groups, make_request
from guided_stage import VOCAB_SIZE, compile_one

from kvwatch.telemetry.events import (
    BlocksReleased,
    BlocksStored,
    DraftsVerified,
    OutOfMemory,
    RequestFinished,
    RequestPreempted,
    StepScheduled,
)
from kvwatch.telemetry.log import EventLog
from kvwatch.telemetry.schema import Event
from kvwatch_engine.contracts.image import PreparedImage, PromptImage
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, SequenceOutput
from kvwatch_engine.contracts.sampling import BeamParams
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.core import EngineCore

E = TypeVar("E", bound=Event)

PERIOD = 5


class Scripted(NullModel):
    """Says what it is told to."""

    def __init__(self, answer: Sequence[int]) -> None:
        super().__init__()
        self.answer = answer

    def next_token(self, prompt: Sequence[int], seed: int, position: int) -> int:  # noqa: ARG002
        return self.answer[position]


class Stage:
    """An engine whose answers repeat themselves but for a slip now and then, checked after each step."""

    def __init__(self, model: NullModel | None = None, *, num_drafted: int = 4, **settings: Any) -> None:
        self.log = EventLog()
        self.model = model or NullModel()
        self.model.period = PERIOD
        values = {"num_blocks": 200, "max_model_len": 200, "max_batch_tokens": 64, "prompt_lookup_min": 1}
        self.core = make_core(self.model, self.log, **{**values, **settings}, num_speculative_tokens=num_drafted)
        self.recorder = Recorder(self.log)
        self.ledger = LedgerFollower(self.log, self.core.snapshot)
        self.outputs: list[SequenceOutput] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.steps: list[StepInput] = []
        self.model.on_step = self.steps.append

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.core.add(request, 0)

    def run(self, max_steps: int = 1000) -> dict[tuple[str, int], list[int]]:
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        return self.tokens

    def step(self) -> None:
        for output in self.core.step():
            self.outputs.append(output)
            self.tokens.setdefault((output.request_id, output.sequence), []).extend(output.token_ids)
        self.core.check_integrity()
        if not self.core.settings.emit_token_ids:  # the engine tells more of its blocks then than events do
            self.ledger.catch_up()
        has_failed = any(event.step == self.log.step for event in self.of(OutOfMemory))
        assert_exact_holdings(self.core, has_failed=has_failed)

    def of(self, cls: type[E]) -> list[E]:
        return [event for event in self.recorder.drain() if isinstance(event, cls)]

    @property
    def num_accepted(self) -> int:
        return sum(event.accepted_tokens for event in self.of(DraftsVerified))

    @property
    def num_rejected(self) -> int:
        return sum(event.rejected_tokens for event in self.of(DraftsVerified))


def assert_exact_holdings(core: EngineCore, *, has_failed: bool) -> None:
    """Each decoding sequence holds the blocks of its computed tokens, filled so far and no further.

    After a step without memory it may hold the block of the token that will be computed next.
    """
    manager = core.manager
    size, filled = manager.block_size, manager.pool.filled_slots
    for request in core.scheduler.lifecycle.running:
        for sequence in request.active_sequences():
            if not sequence.is_decoding:
                continue
            for group in manager.groups:
                table = group.tables[sequence.owner]
                allowed = {-(-sequence.num_computed // size), -(-(sequence.num_computed + has_failed) // size)}
                assert len(table) in allowed
                held = [(index, block) for index, block in enumerate(table) if block]
                assert [filled[block] for _, block in held] == [
                    min(size, sequence.num_computed - index * size) for index, _ in held
                ]


def answers_without_drafts(requests: Sequence[GenerationRequest], **settings: Any) -> dict[tuple[str, int], list[int]]:
    stage = Stage(num_drafted=0, **settings)
    stage.add(*requests)
    return stage.run()


def some_requests() -> list[GenerationRequest]:
    return [
        make_request("plain", [10, 11, 12, 13], max_tokens=40, ignore_eos=True),
        make_request("samples", [10, 20, 30, 40, 41], n=3, temperature=0.8, seed=7, max_tokens=25, ignore_eos=True),
        make_request("ends", [6, 7, 8, 9], max_tokens=60),
        make_request("late", [9, 9, 9], min_tokens=20, max_tokens=60),
        make_request(
            "stops", [10, 11, 12], stop_token_ids=(NullModel().next_token([10, 11, 12], 0, 3),), max_tokens=60
        ),
        make_request("short", [10, 11, 12, 13, 14], max_tokens=2, ignore_eos=True),
    ]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_answers_are_those_without_drafts_and_come_in_fewer_steps(
    block_size: int, windows: tuple[int | None, ...]
) -> None:
    settings: dict[str, Any] = {"block_size": block_size, "groups": make_groups(*windows), "num_blocks": 800}
    expected = answers_without_drafts(some_requests(), **settings)
    stage = Stage(**settings)
    stage.add(*some_requests())

    assert stage.run() == expected
    assert stage.num_accepted > 20
    assert stage.num_rejected > 5
    assert len(stage.steps) < max(map(len, expected.values()))
    assert stage.core.manager.pool.num_used == 0


@pytest.mark.parametrize("num_drafted", [1, 2, 7])
def test_a_sequence_alone_gets_as_many_tokens_as_are_accepted_and_one_more(num_drafted: int) -> None:
    stage = Stage(num_drafted=num_drafted)
    stage.add(make_request("r", [10, 11, 12, 13], max_tokens=50, ignore_eos=True))
    stage.run()

    num_decode_steps = len(stage.steps) - 1
    assert len(stage.tokens["r", 0]) == 50 == 1 + num_decode_steps + stage.num_accepted
    assert max(len(output.token_ids) for output in stage.outputs) == num_drafted + 1
    (finished,) = stage.of(RequestFinished)
    assert (finished.draft_tokens, finished.accepted_draft_tokens) == (
        stage.num_accepted + stage.num_rejected,
        stage.num_accepted,
    )


def test_without_the_setting_nothing_is_added_to_a_step() -> None:
    stage = Stage(num_drafted=0)
    stage.add(*some_requests())
    stage.run()

    assert stage.of(DraftsVerified) == []
    assert all(len(step.sample_rows) <= len(step.context_lens) + 2 for step in stage.steps), "three samples of a prompt"
    assert stage.core.snapshot().config["num_speculative_tokens"] == 0


def test_the_event_says_what_was_accepted_and_what_each_block_still_holds() -> None:
    stage = Stage(Scripted([22, 23, 24, 29, 30, 31]), num_drafted=4, block_size=4)
    stage.add(make_request("r", [20, 21, 22, 23, 24, 25, 26, 20, 21], max_tokens=6, ignore_eos=True))
    stage.step()  # the prompt; then 22 is the newest token

    stage.step()

    (verified,) = stage.of(DraftsVerified)
    assert (verified.requests, verified.proposed, verified.accepted) == (["r"], [4], [2])
    assert (verified.num_drafts, verified.accepted_tokens, verified.rejected_tokens) == (1, 2, 2)
    assert stage.tokens["r", 0] == [22, 23, 24, 29]
    scheduled = stage.of(StepScheduled)[-1]
    assert (scheduled.num_tokens, scheduled.total_tokens) == ([5], 5)  # 22 and the draft 23 24 25 26
    assert scheduled.filled_slots == [4, 2]
    # 12 tokens are computed: three blocks; the fourth, which held 25 and 26, is given back
    (released,) = stage.of(BlocksReleased)
    assert (released.reason, released.block_ids) == ("truncated", scheduled.written_block_ids[-1:])
    assert verified.unwritten_block_ids == []
    (sequence,) = stage.core.scheduler.lifecycle.running[0].sequences
    assert len(stage.core.manager.table(sequence.owner)) == 3


def test_no_block_that_holds_a_rejected_token_can_ever_be_found() -> None:
    stage = Stage(num_drafted=6, block_size=2, emit_token_ids=True)
    requests = some_requests()
    prompts = {request.request_id: request.prompt_token_ids for request in requests}
    stage.add(*requests)
    stage.run()

    texts = {key: [*prompts[key[0]], *tokens] for key, tokens in stage.tokens.items()}
    stored = stage.of(BlocksStored)
    assert len(stored) > 20
    for event in stored:
        told = [token for block in event.token_ids or [] for token in block]
        start = event.first_index * 2
        assert told == texts[event.request, event.sequence][start : start + len(told)]
    assert stage.num_rejected > 0


def test_what_speculation_has_stored_is_found_and_gives_the_same_answers() -> None:
    stage = Stage(block_size=4)
    prompt = [10, 11, 12, 13, 14]
    stage.add(make_request("first", prompt, max_tokens=40, ignore_eos=True))
    answer = list(stage.run()["first", 0])
    longer = [*prompt, *answer[:30]]
    seen: list[list[int]] = []
    stage.model.on_context = lambda _row, tokens: seen.append(tokens)

    stage.add(make_request("again", prompt, max_tokens=40, ignore_eos=True))
    stage.add(make_request("longer", longer, max_tokens=20, ignore_eos=True))
    stage.run()

    assert stage.tokens["again", 0] == answer
    assert stage.tokens["longer", 0] == [NullModel.next_token(stage.model, longer, 0, place) for place in range(20)]
    texts = ([*prompt, *answer], [*longer, *stage.tokens["longer", 0]])
    assert all(any(tokens == text[: len(tokens)] for text in texts) for tokens in seen), "what was hit is what was said"
    cached = {output.request_id: output.num_cached_tokens for output in stage.outputs}
    assert (cached["again"], cached["longer"]) == (4, 32)


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_preempted_sequences_go_on_token_for_token(enable_prefix_cache: bool) -> None:
    requests = [make_request(f"r{i}", [10 + i, 20, 30, 40], max_tokens=30, ignore_eos=True) for i in range(5)]
    expected = answers_without_drafts(requests)
    stage = Stage(num_blocks=22, block_size=4, enable_prefix_cache=enable_prefix_cache)
    stage.add(*requests)

    assert stage.run() == expected
    assert len(stage.of(RequestPreempted)) > 1
    assert stage.num_accepted > 20


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(16, 200), (40, 20)])
def test_nothing_is_computed_behind_the_longest_possible_answer(max_tokens: int, max_model_len: int) -> None:
    """The newest token of a sequence is never computed, and a draft ends where it would be."""
    stage = Stage(num_drafted=8, max_model_len=max_model_len, block_size=1)
    stage.add(make_request("r", [10, 11, 12, 13], max_tokens=max_tokens, ignore_eos=True))
    stage.run()

    longest = min(4 + max_tokens, max_model_len)
    assert len(stage.tokens["r", 0]) == longest - 4
    assert max(int(step.positions.max()) for step in stage.steps) == longest - 2
    assert stage.num_accepted > 0


def test_drafts_take_only_tokens_that_the_step_has_left() -> None:
    stage = Stage(max_batch_tokens=10, num_drafted=8, max_num_seqs=8)
    stage.add(*(make_request(f"r{i}", [10 + i, 20, 30], max_tokens=40, ignore_eos=True) for i in range(6)))
    stage.run()

    assert max(step.num_tokens for step in stage.steps) == 10
    assert stage.num_accepted > 0
    full = Stage(max_batch_tokens=6, max_num_seqs=6)
    full.add(*(make_request(f"r{i}", [10 + i, 20, 30], max_tokens=20, ignore_eos=True) for i in range(6)))
    full.run()
    assert all(event.total_tokens <= 6 for event in full.of(StepScheduled))
    assert len({len(tokens) for tokens in full.tokens.values()}) == 1


def test_a_chunk_with_a_draft_is_no_longer_than_chunks_may_be() -> None:
    stage = Stage(num_drafted=8, max_prefill_chunk=3)
    stage.add(make_request("r", [10, 11, 12, 13], max_tokens=40, ignore_eos=True))
    stage.run()

    assert max(step.num_tokens for step in stage.steps) == 3
    assert stage.num_accepted > 5


def test_a_new_request_is_admitted_as_soon_as_without_drafts() -> None:
    admitted: list[list[int]] = []
    for num_drafted in (0, 6):
        stage = Stage(num_drafted=num_drafted, num_blocks=26, block_size=4, max_batch_tokens=12, watermark_blocks=1)
        stage.add(make_request("old", [10, 11, 12, 13], max_tokens=50, ignore_eos=True))
        for _ in range(4):
            stage.step()
        stage.add(*(make_request(f"r{i}", [10 + i] * 20, max_tokens=4, ignore_eos=True) for i in range(3)))
        steps = []
        while stage.core.scheduler.lifecycle.waiting.head is not None:
            steps.append(len(stage.core.scheduler.lifecycle.running))
            stage.step()
        admitted.append(steps)
    assert admitted[0] == admitted[1]


def test_while_somebody_waits_for_blocks_drafts_take_none() -> None:
    stage = Stage(num_drafted=6, num_blocks=14, block_size=4, enable_prefix_cache=False)
    stage.add(make_request("runs", [10, 11, 12, 13], max_tokens=40, ignore_eos=True))
    stage.step()
    stage.add(make_request("waits", [10] * 48, max_tokens=2, ignore_eos=True))
    num_waited = num_drafts = 0
    while running := stage.core.scheduler.lifecycle.running:
        (sequence,) = running[0].sequences
        needed = -(-sequence.num_tokens // 4)
        stage.step()
        if stage.core.scheduler.admission.waiting_for.get("blocks"):
            num_waited += 1
            num_drafts += len(stage.steps[-1].sample_rows) - 1
            assert stage.steps[-1].block_tables.shape == (1, needed), "the blocks of its tokens, and none for a draft"

    assert num_waited > 5
    assert num_drafts > 0, "they fill the blocks that their sequence has"
    stage.run()
    assert len(stage.tokens["waits", 0]) == 2


def test_beams_grammars_and_prompts_with_images_get_no_drafts() -> None:
    stage = Stage(NullModel(VOCAB_SIZE), vocab_size=VOCAB_SIZE)
    image = PromptImage(1, 2, PreparedImage(bytes(32), np.zeros((1, 1, 1), np.float32)))
    shown = replace(make_request("image", [10, 11, 11, 12], max_tokens=20, ignore_eos=True), images=(image,))
    guided = replace(
        make_request("guided", [10, 11, 12], max_tokens=20), guide=compile_one("regex", "(ab){3}"), images=()
    )
    beams = make_request("beams", [10, 10, 10], n=2, max_tokens=12, beams=BeamParams(width=2), ignore_eos=True)
    stage.add(shown, guided, beams)
    stage.run()

    assert stage.of(DraftsVerified) == []
    assert {output.request_id for output in stage.outputs} == {"image", "guided", "beams"}


def test_a_draft_behind_which_nothing_can_follow_is_cut_at_the_end_token() -> None:
    stage = Stage(Scripted([11, 3, 12, 12]), num_drafted=4)
    stage.add(make_request("r", [10, 11, 3, 14, 15, 10], max_tokens=4))
    stage.run()

    (verified,) = stage.of(DraftsVerified)
    assert (verified.proposed, verified.accepted) == ([1], [0])
    assert stage.tokens["r", 0] == [11, 3]
    assert (stage.outputs[-1].finish_reason, stage.outputs[-1].is_stop_token) == (FinishReason.STOP, True)


def test_a_sequence_that_ends_within_a_draft_gets_nothing_behind_its_end() -> None:
    stage = Stage(Scripted([11, 12, 13, 14, 15, 16]), num_drafted=4)
    stage.add(make_request("r", [10, 11, 12, 13, 14, 15, 10], max_tokens=6, stop_token_ids=(13,), ignore_eos=True))
    stage.run()

    assert stage.tokens["r", 0] == [11, 12, 13]
    assert stage.core.manager.pool.num_used == 0


@pytest.mark.parametrize("min_tokens", range(7))
def test_end_tokens_are_forbidden_at_the_positions_at_which_they_are_without_drafts(min_tokens: int) -> None:
    answer = [11, 12, 13, 3, 3, 15, 16, 17]
    found = []
    for num_drafted in (0, 5):
        stage = Stage(Scripted(answer), num_drafted=num_drafted)
        stage.add(make_request("r", [10, 11, 12, 13, 14, 10], max_tokens=8, min_tokens=min_tokens))
        found.append(stage.run())
    assert stage.num_accepted > 0
    assert found[0] == found[1]


class Defective(NullModel):
    """Rows of one position have no finite logits."""

    def execute(self, step: StepInput) -> StepResult:
        result = super().execute(step)
        errors = {place: "not finite" for place, row in enumerate(step.sample_rows) if row.position == 12}
        return replace(result, errors=errors)


def test_a_position_without_finite_logits_ends_its_sequence_there_with_drafts_or_without() -> None:
    found = []
    for num_drafted in (0, 4):
        stage = Stage(Defective(), num_drafted=num_drafted)
        stage.add(make_request("r", [10, 11, 12, 13], max_tokens=40, ignore_eos=True))
        stage.run()
        found.append((stage.tokens["r", 0], stage.outputs[-1].finish_reason, stage.outputs[-1].error))
        assert stage.core.manager.pool.num_used == 0
    assert found[0] == found[1]
    assert found[0][1:] == (FinishReason.ERROR, "not finite")
    assert len(found[0][0]) == 12


class Narrow(NullModel):
    """Has no memory for steps of more than four tokens, and says so before or after it has written."""

    fails_late = False

    def execute(self, step: StepInput) -> StepResult:
        if step.num_tokens <= 4:
            return super().execute(step)
        if self.fails_late:
            super().execute(step)
        raise MemoryError("made to fail")


@pytest.mark.parametrize("fails_late", [False, True])
def test_drafts_of_a_step_without_memory_are_given_back(fails_late: bool) -> None:
    requests = [make_request(f"r{i}", [10 + i, 11, 12], max_tokens=30, ignore_eos=True) for i in range(2)]
    model = Narrow()
    model.fails_late = fails_late
    stage = Stage(model, num_drafted=5, block_size=2)
    stage.add(*requests)

    assert stage.run() == answers_without_drafts(requests)
    assert len(stage.of(OutOfMemory)) > 1
    assert stage.num_accepted > 0


def test_a_failed_step_leaves_nothing_behind() -> None:
    class Failing(NullModel):
        def execute(self, step: StepInput) -> StepResult:
            if len(step.sample_rows) > 1:
                raise RuntimeError("made to fail")
            return super().execute(step)

    stage = Stage(Failing())
    stage.add(make_request("r", [10, 11, 12, 13], max_tokens=40, ignore_eos=True))
    stage.run()

    assert stage.outputs[-1].finish_reason is FinishReason.ERROR
    assert stage.of(DraftsVerified) == []
    assert stage.core.manager.pool.num_used == 0
