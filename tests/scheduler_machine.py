"""The scheduler under random load: fair, within its budgets, exact in its events, right in its answers."""

from builders import LedgerFollower, NullModel, make_core, make_request
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.request import FinishReason, SequenceOutput
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.core import sequence_seed
from kvwatch_engine.scheduling.policy import worst_case_blocks
from kvwatch_engine.scheduling.request import RequestState

EOS = 3


class FailingModel(NullModel):
    """A null model whose next step can be made to fail, as a model that runs out of memory would."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_next = False

    def execute(self, step: StepInput) -> StepResult:
        if self.fail_next:
            self.fail_next = False
            raise MemoryError("made to fail")
        return super().execute(step)


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, abort, stop, fail and step at random.

    The oracle knows each sequence's whole answer in advance, since the null model's tokens depend on (prompt, seed,
    position) only: whatever is batched, chunked, shared, preempted or recomputed, the answer must be this one.
    """

    @initialize(
        num_blocks=st.integers(12, 60),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(3, 8),
        extra_budget=st.integers(0, 24),
        max_chunk=st.one_of(st.none(), st.integers(1, 8)),
        watermark=st.integers(0, 3),
        enable_cache=st.booleans(),
        log_capacity=st.sampled_from([16, 100_000]),
        closely=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        max_chunk: int | None,
        watermark: int,
        enable_cache: bool,
        log_capacity: int,
        closely: bool,
    ) -> None:
        self.is_followed_closely = closely
        self.log = EventLog(log_capacity)  # with 16 the ledger loses events all the time and has to heal itself
        self.model = FailingModel()
        self.model.on_step = self.check_step
        self.model.on_context = self.check_context
        self.core = make_core(
            self.model,
            self.log,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_num_seqs + extra_budget,
            max_prefill_chunk=max_chunk,
            watermark_blocks=watermark,
            enable_prefix_cache=enable_cache,
        )
        self.ledger = LedgerFollower(self.log, self.core.snapshot)
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}

    # ------------------------------------------------------------------ rules

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def submit(self, prompt: list[int], n: int, max_tokens: int, min_tokens: int, ignore_eos: bool, seed: int) -> None:
        config = self.core.settings
        if worst_case_blocks(len(prompt), max_tokens, n, config.block_size) > config.num_blocks - 1:
            return  # refused at submission
        request_id = f"r{len(self.prompts)}"
        self.prompts[request_id] = tuple(prompt)
        for index in range(n):
            answer = self.expected_answer(tuple(prompt), sequence_seed(seed, index), max_tokens, min_tokens, ignore_eos)
            self.expected[request_id, index] = answer
        self.core.add(
            make_request(
                request_id,
                prompt,
                n=n,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                seed=seed,
            ),
            self.log.clock.monotonic_ns(),
        )

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.collect(self.core.step())

    @rule(
        kind=st.sampled_from(["abort", "stop", "fail a step", "reset"]),
        pick=st.integers(0, 10_000),
        sequence=st.integers(0, 3),
    )
    def disturb(self, kind: str, pick: int, sequence: int) -> None:
        """One rule for all that ends things early, so that most of the time things go on."""
        live = self.core.live_request_ids()
        if kind == "reset":
            self.core.manager.pool.clear_cache()
        elif kind == "fail a step":
            self.model.fail_next = True
            self.collect(self.core.step())
            self.model.fail_next = False
        elif live and kind == "abort":
            self.collect(self.core.abort(live[pick % len(live)]))
        elif live:
            key = (live[pick % len(live)], sequence)
            self.core.stop_sequence(*key)
            if key in self.expected:
                self.reasons.setdefault(key, FinishReason.STOP)

    @rule()
    def ledger_catches_up(self) -> None:
        self.ledger.catch_up()

    @invariant()
    def ledger_equals_the_engine_after_every_rule(self) -> None:
        """Half of the time; else it only catches up now and then, and loses events if the log is short."""
        if getattr(self, "is_followed_closely", False):
            self.ledger.catch_up()

    # ------------------------------------------------------------------ invariants

    @invariant()
    def everything_is_sound(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_integrity()
        lifecycle = self.core.scheduler.lifecycle
        holders = {owner.request for owner in self.core.manager.owners()}
        running = {request.request_id for request in lifecycle.running}
        assert holders == running, "waiting and finished requests hold no block, running ones do"
        arrivals = [request.arrival for request in lifecycle.waiting]
        assert arrivals == sorted(arrivals)
        if lifecycle.running and arrivals:
            assert max(request.arrival for request in lifecycle.running) < arrivals[0], "nobody was overtaken"
        assert all(request.state is RequestState.RUNNING for request in lifecycle.running)

    @invariant()
    def filled_slots_are_computed_tokens(self) -> None:
        """Without any sharing, each computed token fills one slot of its own."""
        if not hasattr(self, "core") or self.core.settings.enable_prefix_cache:
            return
        running = self.core.scheduler.lifecycle.running
        if all(len(request.sequences) == 1 for request in running):
            pool = self.core.manager.pool
            filled = sum(pool.filled_slots[block] for block, count in enumerate(pool.ref_counts) if count)
            assert filled == sum(request.sequences[0].num_computed for request in running)

    def check_step(self, step: StepInput) -> None:
        config = self.core.settings
        assert 0 < step.num_tokens <= config.max_batch_tokens
        assert len(step.context_lens) <= config.max_num_seqs
        lengths = (step.query_starts[1:] - step.query_starts[:-1]).tolist()
        assert min(lengths) >= 1
        assert max(lengths) <= (config.max_prefill_chunk or config.max_batch_tokens)
        assert len(set(step.slot_mapping.tolist())) == step.num_tokens, "no slot is written twice"
        assert int(step.slot_mapping.min()) >= config.block_size, "the null block is never written"
        for request in self.core.scheduler.lifecycle.running:
            for sequence in request.active_sequences():
                if sequence.is_decoding:
                    assert sequence.num_tokens - 1 in step.positions, "whoever decodes is in every step"

    def check_context(self, _row: int, tokens: list[int]) -> None:
        """What a query looks back at is the beginning of some sequence, prompt and answer."""
        assert any(
            [*self.prompts[request_id], *answer][: len(tokens)] == tokens
            for (request_id, _), answer in self.expected.items()
        )

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.collect(self.core.step())
        assert not self.core.has_work, "nobody starves"
        assert set(self.reasons) == set(self.expected), "every sequence ends"
        for key, reason in self.reasons.items():
            answer = self.answers.get(key, [])
            assert answer == self.expected[key][: len(answer)]
            if reason is FinishReason.LENGTH:
                assert answer == self.expected[key]
        self.ledger.catch_up()
        pool = self.core.manager.pool
        assert pool.num_used == 0
        assert pool.num_cached + pool.num_empty == pool.capacity

    # ------------------------------------------------------------------ parts

    def collect(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.sequence)
            assert key not in self.reasons, "nothing comes after the end"
            self.answers.setdefault(key, []).extend(output.token_ids)
            assert self.answers[key] == self.expected[key][: len(self.answers[key])]
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
                if output.finish_reason is FinishReason.STOP:
                    assert self.answers[key] == self.expected[key]
                    assert output.is_stop_token

    def expected_answer(
        self, prompt: tuple[int, ...], seed: int, max_tokens: int, min_tokens: int, ignore_eos: bool
    ) -> list[int]:
        answer: list[int] = []
        while len(answer) < max_tokens and len(prompt) + len(answer) < self.core.settings.max_model_len:
            token = self.model.next_token(prompt, seed, len(answer))
            if token == EOS and not ignore_eos and len(answer) < min(min_tokens, max_tokens):
                token = (token + 1) % self.model.vocab_size
            answer.append(token)
            if token == EOS and not ignore_eos:
                break
        return answer
