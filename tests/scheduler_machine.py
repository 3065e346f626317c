"""The scheduler under random load: fair, within its budgets, exact in its events, right in its answers."""

from dataclasses import replace
from random import Random
from typing import Any

from builders import FakeClock, LedgerFollower, NullModel, make_core, make_groups, make_request, run_until_idle
from dict_tiers import DictTiers
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from slot_store import SlotStore
from tier_faults import SteppedWorker

from kvwatch.control import PrefixScope
from kvwatch.errors import ChangeFailed, ChangeRefused
from kvwatch.telemetry.log import EventLog
from kvwatch_engine.contracts.cache import most_window_blocks
from kvwatch_engine.contracts.request import FinishReason, GenerationRequest, SequenceOutput
from kvwatch_engine.contracts.sampling import BeamParams
from kvwatch_engine.contracts.step import StepInput, StepResult
from kvwatch_engine.contracts.tiers import Tiers
from kvwatch_engine.core import sequence_seed
from kvwatch_engine.live.changer import Changer, RebuildLimits
from kvwatch_engine.memory.block_manager import BlockManager
from kvwatch_engine.memory.tiers.block_file import StoreIdentity
from kvwatch_engine.memory.tiers.tiers import Machine, MemoryTiers, TierSettings
from kvwatch_engine.memory.tiers.worker import Mover
from kvwatch_engine.prefixes import PrefixDesk
from kvwatch_engine.scheduling.policy import most_blocks
from kvwatch_engine.scheduling.request import Request, RequestState

EOS = 3
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None, 6), (7,), (None, 1, 9), (None, None))
"""Windows of the KV groups: half of the time one group that sees all."""


class FailingModel(NullModel):
    """A null model whose next steps can be made to fail, before or after they have written."""

    def __init__(self) -> None:
        super().__init__()
        self.next_errors: list[Exception] = []
        self.fails_late = False
        self.token_ns = 0
        """What a token takes, by its own account."""

    def execute(self, step: StepInput) -> StepResult:
        error = self.next_errors.pop() if self.next_errors else None
        if error is not None and not self.fails_late:
            raise error
        result = super().execute(step)
        if error is not None:
            raise error
        return replace(result, forward_ns=self.token_ns * step.num_tokens)


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, abort, stop, fail and step at random, with other tiers or without.

    The oracle knows each sequence's whole answer in advance, since the null model's tokens depend on (prompt, seed,
    position) only: whatever is batched, chunked, shared, preempted or recomputed, the answer must be this one.
    """

    has_run_out = False
    """Whether memory was short in a step."""
    largest_block_size = 1
    """Of all that the engine had: what moved to smaller blocks is still as much as larger ones held."""

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
        policies=st.tuples(
            st.sampled_from(["recompute", "swap", "auto"]),
            st.sampled_from(["newest", "least-computed", "lowest-priority"]),
            st.booleans(),  # whether prompts are reserved
            st.sampled_from([0.0, 0.5, 30.0]),  # seconds of ageing
            st.integers(1, 4),  # preemptions until a request is protected
            st.sampled_from([(0.0, 0.0), (0.03, 0.05), (0.0, 0.02)]),  # bounds of a step; a token takes 1 ms
        ),
        tiers=st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {
                    "max_polls": st.integers(0, 4),
                    "failure_rate": st.sampled_from([0.0, 0.0, 0.3, 1.0]),
                    "host_blocks": st.integers(4, 80),
                    "num_prefixes": st.sampled_from([0, 20]),
                    "seconds_per_block": st.sampled_from([None, 0.0, 1.0]),
                }
            ),
            st.fixed_dictionaries(
                {
                    "copy_failures": st.sampled_from([0.0, 0.2, 1.0]),
                    "host_blocks": st.integers(4, 80),
                    "seconds": st.sampled_from([0.3, 100.0]),
                }
            ),
        ),
        tiers_seed=st.integers(0, 1000),
        windows=st.sampled_from(WINDOWS),
        speculation=st.one_of(st.none(), st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(2, 6))),
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
        policies: tuple[str, str, bool, float, int, tuple[float, float]],
        tiers: dict[str, Any] | None,
        tiers_seed: int,
        windows: tuple[int | None, ...],
        speculation: tuple[int, int, int] | None,
    ) -> None:
        """`speculation`: most tokens of a draft, fewest that must match, period of the answers."""
        if tiers is not None:
            windows = (None,)  # tiers serve no other models
        self.is_followed_closely = closely
        self.tiers_random = Random(tiers_seed)
        self.worker: SteppedWorker | None = None
        self.clock = FakeClock()
        # With 16 the ledger loses events all the time and has to heal itself.
        self.log = EventLog(log_capacity, self.clock)
        self.model = FailingModel()
        num_drafted, least_match, self.model.period = speculation or (0, 1, 0)
        self.model.token_ns = 1_000_000 if any(policies[5]) else 0
        self.model.slot_bytes = 8
        self.model.on_step = self.check_step
        self.model.on_context = self.check_context
        self.core = make_core(
            self.model,
            self.log,
            num_blocks=num_blocks * len(windows),
            groups=make_groups(*windows),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_num_seqs + extra_budget,
            max_prefill_chunk=max_chunk,
            watermark_blocks=watermark,
            enable_prefix_cache=enable_cache,
            preemption_mode=policies[0],
            victim_policy=policies[1],
            reserve_prompt=policies[2],
            priority_aging_seconds=policies[3],
            protect_after_preemptions=policies[4],
            target_itl_seconds=policies[5][0],
            max_step_seconds=policies[5][1],
            num_speculative_tokens=num_drafted,
            prompt_lookup_min=least_match,
            make_tiers=None if tiers is None else lambda manager: self.make_tiers(manager, tiers),
        )
        self.desk = PrefixDesk(self.core)
        self.admitted: dict[str, Request] = {}
        self.ledger = LedgerFollower(self.log, self.core.snapshot)
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.deadlines: dict[str, int | None] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.searches: set[str] = set()
        self.beginnings: set[tuple[int, ...]] = set()
        """What beams look back at when nothing disturbs them."""

    def make_tiers(self, manager: BlockManager, settings: dict[str, Any]) -> Tiers:
        """Return tiers over dictionaries, or, if a share of failures is given for copies, the real ones."""
        if "copy_failures" not in settings:
            return DictTiers(manager, self.log, self.model, self.tiers_random, **settings)
        device = SlotStore(self.model)
        self.copy_failures = settings["copy_failures"]
        device.before = self.fail_copy
        block_bytes = 8 * manager.block_size
        return MemoryTiers(
            manager,
            TierSettings(host_bytes=block_bytes * settings["host_blocks"], transfer_seconds=settings["seconds"]),
            Machine(device, make_worker=self.make_worker),
            StoreIdentity(
                weights_fingerprint="w",
                kv_dtype="int64",
                block_size=manager.block_size,
                num_layers=1,
                num_kv_heads=1,
                head_dim=1,
            ),
            block_bytes,
            self.log,
        )

    def make_worker(self, mover: Mover) -> SteppedWorker:
        self.worker = SteppedWorker(mover)
        return self.worker

    def fail_copy(self) -> None:
        if self.tiers_random.random() < self.copy_failures:
            raise RuntimeError("made to fail")

    # ------------------------------------------------------------------ rules

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 1000),
        priority=st.integers(0, 3),
        deadline=st.sampled_from([None, None, None, 0.3, 5.0]),
        width=st.sampled_from([0, 0, 1, 2, 4]),
    )
    def submit(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int,
        min_tokens: int,
        ignore_eos: bool,
        seed: int,
        priority: int,
        deadline: float | None,
        width: int,
    ) -> None:
        config = self.core.settings
        width = min(width, config.max_num_seqs)
        if most_blocks(config, len(prompt), max_tokens, width or n) > config.num_blocks - 1:
            return  # refused at submission
        request_id = f"r{len(self.prompts)}"
        self.prompts[request_id] = tuple(prompt)
        for index in range(0 if width else n):
            answer = self.expected_answer(tuple(prompt), sequence_seed(seed, index), max_tokens, min_tokens, ignore_eos)
            self.expected[request_id, index] = answer
        request = make_request(
            request_id,
            prompt,
            n=min(n, width) if width else n,
            beams=BeamParams(width=width, length_penalty=float(seed % 3)) if width else None,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=ignore_eos,
            seed=seed,
        )
        if width:
            self.expect_search(request)
        now = self.clock.monotonic_ns()
        self.deadlines[request_id] = None if deadline is None else now + int(deadline * 1e9)
        self.core.add(replace(request, priority=priority, deadline_seconds=deadline), now)

    @rule(num_blocks=st.integers(2, 70))
    def resize(self, num_blocks: int) -> None:
        """Between two steps, whatever runs; refused, it changes nothing."""
        self.model.spare_bytes = 1 << 40
        num_blocks *= len(self.core.settings.groups)
        before = self.core.snapshot()
        needed = [
            most_blocks(self.core.settings, r.num_prompt_tokens, r.sampling.max_tokens, r.sampling.num_sequences)
            for r in self.core.scheduler.lifecycle.requests()
        ]
        if self.num_in_flight:
            return  # the engine asks again when the transfers have ended
        pool, settings = self.core.manager.pool, self.core.settings
        pinned, watermark = settings.num_pinned_blocks, settings.watermark_blocks
        least = max([pool.num_used + pool.num_idle_pinned, *(each + pinned for each in [watermark + 1, *needed])])
        is_possible = least <= num_blocks - 1 and pinned <= int(settings.max_pinned_ratio * (num_blocks - 1))
        try:
            self.core.resize(self.core.prepare_resize(num_blocks))
        except ChangeRefused:
            assert not is_possible
            after = self.core.snapshot()
            assert (after.tiers, after.sequences, after.config) == (before.tiers, before.sequences, before.config)
        else:
            assert is_possible
            assert self.core.snapshot().config["num_blocks"] == num_blocks

    @rule(block_size=st.sampled_from([1, 2, 3, 4, 8]), is_copied=st.booleans())
    def rebuild(self, block_size: int, is_copied: bool) -> None:
        """Between two steps, whatever runs: live tokens are copied or computed again; refused, it changes nothing."""
        before = self.core.snapshot()
        old_size = self.core.settings.block_size
        self.largest_block_size = max(self.largest_block_size, old_size)
        self.model.spare_bytes = (1 << 40) if is_copied else 0
        changer = Changer(self.core, RebuildLimits(cooldown_seconds=0.0))
        try:
            _, carry_out = changer.prepare({"block_size": block_size}, [], actor="test", reason="", version=None)
        except ChangeRefused:
            after = self.core.snapshot()
            assert (after.tiers, after.sequences, after.config) == (before.tiers, before.sequences, before.config)
            return
        try:
            carry_out()
        except ChangeFailed:  # the host tier is too small for such a block
            assert self.core.tiers is not None
            assert (self.core.manager.block_size, self.core.settings.block_size) == (old_size, old_size)
        else:
            assert (self.core.manager.block_size, self.core.settings.block_size) == (block_size, block_size)

    @rule(kind=st.sampled_from(["prompt", "request", "unpin"]), pick=st.integers(0, 10_000), length=st.integers(1, 30))
    def pin(self, kind: str, pick: int, length: int) -> None:
        """Pin what is there, by tokens or by request, or end a pin; refused, it changes nothing."""
        names = sorted(self.prompts)
        before = self.core.snapshot()
        try:
            if kind == "unpin":
                pins = self.desk.pins()
                name = pins[pick % len(pins)].pin if pins else "none"
                _, carry_out = self.desk.prepare_unpin(name, actor="test", reason="")
            elif kind == "request" or not names:
                name = names[pick % len(names)] if names else "none"
                _, carry_out = self.desk.prepare_pin_of(name, length, self.core.accepted(), actor="test", reason="")
            else:
                tokens = self.prompts[names[pick % len(names)]][:length]
                scope = PrefixScope()
                _, carry_out = self.desk.prepare_pin(tokens, scope, self.core.accepted(), actor="test", reason="")
            carry_out()
        except ChangeRefused:
            after = self.core.snapshot()
            assert (after.tiers, after.pins, after.config) == (before.tiers, before.pins, before.config)
        pool, settings = self.core.manager.pool, self.core.settings
        assert len(pool.pinned) == settings.num_pinned_blocks <= settings.max_pinned_blocks

    @rule(count=st.integers(1, 12), seconds=st.sampled_from([0.0, 0.0, 0.01, 0.4]))
    def step(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.clock.advance(seconds)
            self.run_step()

    @rule(
        kind=st.sampled_from(["abort", "stop", "fail a step", "run out of memory", "reset", "pause"]),
        pick=st.integers(0, 10_000),
        sequence=st.integers(0, 3),
    )
    def disturb(self, kind: str, pick: int, sequence: int) -> None:
        """One rule for all that ends things early, so that most of the time things go on."""
        live = self.core.live_request_ids()
        if kind == "reset":
            before = self.core.log.clock.monotonic_ns()
            reset = self.desk.reset(unpin=True, actor="test", reason="")
            assert self.core.manager.pool.num_cached == 0
            assert (reset.time_ns, self.desk.pins()) == (before, [])
            self.clock.advance(0.001)
        elif kind == "pause":
            pause = self.core.scheduler.admission.pause
            pause.begin(pick % 7 * 0.1, "test", "") if pick % 2 else pause.end("test", "")
        elif kind == "fail a step":
            self.fail([RuntimeError("made to fail")], late=bool(pick % 2))
        elif kind == "run out of memory":
            self.has_run_out = True
            self.fail([MemoryError("made to fail")] * (1 + pick % 3), late=bool(pick % 2))
        elif live and kind == "abort":
            self.collect(self.core.abort(live[pick % len(live)]))
        elif live:
            key = (live[pick % len(live)], sequence)
            self.core.stop_sequence(*key)
            if key in self.expected and key[0] not in self.searches:  # beams end together
                self.reasons.setdefault(key, FinishReason.STOP)

    def fail(self, errors: list[Exception], *, late: bool) -> None:
        self.model.next_errors, self.model.fails_late = errors, late
        for _ in errors:
            self.run_step()
        self.model.next_errors = []

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
        assert running <= holders
        awaited = {request.request_id for request in lifecycle.requests() if request.transfer is not None}
        assert holders - running <= self.in_transfer() | awaited, "who does not run holds blocks for a transfer at most"
        for queue in (list(lifecycle.waiting), lifecycle.running):
            ranks = [request.rank for request in queue]
            assert ranks == sorted(ranks)
        assert all(request.state is RequestState.RUNNING for request in lifecycle.running)
        live = lifecycle.requests()
        assert len(live) == len(lifecycle.running) + len(lifecycle.waiting) + len(lifecycle.arriving)

    @invariant()
    def nobody_is_admitted_before_an_earlier_one_of_the_same_priority(self) -> None:
        if not hasattr(self, "core"):
            return
        lifecycle = self.core.scheduler.lifecycle
        self.admitted |= {each.request_id: each for each in lifecycle.running}
        last: dict[int, tuple[int, int]] = {}
        for request in self.admitted.values():
            last[request.priority] = max(request.rank, last.get(request.priority, request.rank))
        for request in lifecycle.waiting:
            # Who was first, but whose restore took too long, has left the way free meanwhile.
            if request.admitted_ns is None and request.is_restorable and request.priority in last:
                assert last[request.priority] < request.rank

    @invariant()
    def filled_slots_are_computed_tokens(self) -> None:
        """Without any sharing, each computed token fills one slot of its own in each KV group, until it is passed."""
        if not hasattr(self, "core") or self.core.settings.enable_prefix_cache or self.num_in_flight:
            return
        if self.core.manager.has_windows:
            return
        running = self.core.scheduler.lifecycle.running
        if all(len(request.sequences) == 1 for request in running):
            pool = self.core.manager.pool
            filled = sum(pool.filled_slots[block] for block, count in enumerate(pool.ref_counts) if count)
            computed = sum(request.sequences[0].num_computed for request in running)
            assert filled == computed * len(self.core.settings.groups)

    @invariant()
    def windows_bound_what_is_held(self) -> None:
        """Between two steps a group with a window holds no more than the next token can see, and a block.

        After a step for which memory was short it may also hold what was to be written: smaller steps write it. What
        was in larger blocks before a rebuild is given up when its sequence goes on.
        """
        if not hasattr(self, "core"):
            return
        for group in self.core.manager.groups:
            if group.window is not None:
                before = max(self.largest_block_size, group.block_size)
                most = (-(-group.window // before) + 2) * before // group.block_size
                if self.has_run_out:
                    most = max(most, most_window_blocks(group.window, self.core.settings.max_chunk, group.block_size))
                assert all(len(group.held(owner)) <= most for owner in self.core.manager.owners())

    def check_step(self, step: StepInput) -> None:
        config = self.core.settings
        assert 0 < step.num_tokens <= config.max_batch_tokens
        assert len(step.context_lens) <= config.max_num_seqs
        lengths = (step.query_starts[1:] - step.query_starts[:-1]).tolist()
        assert min(lengths) >= 1
        assert max(lengths) <= (config.max_prefill_chunk or config.max_batch_tokens)
        assert len(set(step.slot_mapping.tolist())) == step.num_tokens, "no slot is written twice"
        assert int(step.slot_mapping.min()) >= config.block_size, "the null block is never written"
        if self.num_in_flight or self.core.scheduler._step_size.max_tokens is not None:
            return  # somebody may have to wait
        for request in self.core.scheduler.lifecycle.running:
            for sequence in request.active_sequences():
                if sequence.is_decoding:
                    assert sequence.num_tokens - 1 in step.positions, "whoever decodes is in every step"

    def check_context(self, _row: int, tokens: list[int]) -> None:
        """What a query looks back at is the beginning of some sequence, prompt and answer."""
        assert tuple(tokens) in self.beginnings or any(
            [*self.prompts[request_id], *answer][: len(tokens)] == tokens
            for (request_id, _), answer in self.expected.items()
        )

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.scheduler.admission.pause.end("test", "")
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.run_step()
        assert not self.core.has_work, "nobody starves"
        assert set(self.reasons) == set(self.expected), "every sequence ends"
        for key, reason in self.reasons.items():
            answer = self.answers.get(key, [])
            assert answer == self.expected[key][: len(answer)]
            deadline = self.deadlines[key[0]]
            assert reason is not FinishReason.DEADLINE or (deadline is not None and deadline <= self.log.now_ns)
            if reason is FinishReason.LENGTH:
                assert answer == self.expected[key]
        self.ledger.catch_up()
        pool = self.core.manager.pool
        assert pool.num_used == 0
        assert pool.num_cached + pool.num_empty == pool.capacity
        assert not [each for each in self.core.snapshot().sequences if each.block_ids], "nobody holds a block anywhere"
        if isinstance(self.core.tiers, DictTiers):
            assert not self.core.tiers.kept

    # ------------------------------------------------------------------ parts

    def run_step(self) -> None:
        if self.worker is not None:
            self.worker.carry_out(self.tiers_random.choice([0, 0, 1, 2]))
        num_errors = len(self.model.next_errors)
        self.collect(self.core.step())
        lifecycle = self.core.scheduler.lifecycle
        waiting = [*lifecycle.waiting, *lifecycle.arriving]
        if len(self.model.next_errors) == num_errors:  # else some were preempted after the step was composed
            assert all(request.wait_reason is not None for request in waiting), "all that wait say why"
        assert all((request.wait_reason == "transfer") or request.transfer is None for request in waiting)
        now = self.log.now_ns
        assert all(each.deadline_ns is None or each.deadline_ns > now for each in lifecycle.requests())

    @property
    def num_in_flight(self) -> int:
        return self.core.tiers.num_in_flight if self.core.tiers is not None else 0

    def in_transfer(self) -> set[str]:
        """Return the requests that take part in a transfer, those among them that have ended included."""
        tiers = self.core.tiers
        if isinstance(tiers, DictTiers):
            return {transfer.request_id for transfer in tiers.in_flight}
        return set() if tiers is None else {transfer.request for transfer in tiers.transfers()}

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

    def expect_search(self, request: GenerationRequest) -> None:
        """Run a search alone in a pool that is large enough: whatever happens to it here, it must find the same."""
        settings = self.core.settings
        model = NullModel()
        model.on_context = lambda _row, tokens: self.beginnings.add(tuple(tokens))
        alone = make_core(model, num_blocks=1000, max_num_seqs=settings.max_num_seqs, enable_prefix_cache=False)
        alone.add(request, 0)
        found = run_until_idle(alone)
        self.expected |= found
        self.searches.add(request.request_id)
        prompt = list(request.prompt_token_ids)
        self.beginnings |= {tuple(prompt[: end + 1]) for end in range(len(prompt))}

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
