"""Decides what each step computes, and learns from what came out. Pure: no torch, no threads, no I/O.

In a step every running sequence gets its next token. What is left of the step's token budget goes to prompts, those under
way before new ones. Who is admitted, and in which order, is `pdserve.engine.admission`'s.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.core.errors import ErrorCode, IllegalTransition, PdserveError
from pdserve.core.events import EngineLoad, PromptLogprobs, Stage, StageReport, Token
from pdserve.core.geometry import KVGeometry
from pdserve.core.ids import AttemptKey
from pdserve.engine.admission import Admission
from pdserve.engine.attempt import Attempt, Phase, RunningSequence, fork
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.prefill_speed import PrefillSpeed
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.slices import PromptBudget, decode_slice, prompt_slice, take_copies
from pdserve.engine.work import (
    NO_TOKEN,
    Command,
    Commit,
    Failed,
    Granted,
    Group,
    Prefill,
    Progress,
    Release,
    Reserve,
    Sampled,
    SequenceSlice,
    StepOutcome,
    StepPlan,
    Stop,
)

_NOT_NUMBERS = PdserveError(
    ErrorCode.engine_failed, "the model's logits for this prompt are not numbers; another dtype may help"
)


class Scheduler:
    """Commands in, plans out, results in, outcomes out.

    Between `plan` and the `commit` or `fail` of that plan nothing else may be called but `handed_over`.
    """

    def __init__(
        self,
        blocks: BlockManager,
        geometry: KVGeometry,
        max_context_tokens: int,
        settings: SchedulerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.attempts: dict[AttemptKey, Attempt] = {}
        self._geometry = geometry
        self._max_context_tokens = max_context_tokens
        self._settings = settings
        self._clock = clock
        self._admission = Admission(blocks, geometry, max_context_tokens, settings)
        # Dicts as ordered sets: removal costs the same wherever it is.
        self._prefilling: dict[Attempt, None] = {}
        self._running: dict[RunningSequence, None] = {}
        self._plan = StepPlan(())
        self._planned: list[Attempt | RunningSequence] = []
        self._plan_start_s = 0.0
        self._speed = PrefillSpeed()
        self._outcome = StepOutcome()

    @property
    def has_work(self) -> bool:
        """Whether a step would do or tell anything. False while the queue only waits for something to be given back."""
        outcome = self._outcome
        return bool(
            self._running
            or self._prefilling
            or (self._admission.may_admit and self._admission.queue)
            or outcome.tokens
            or outcome.failed
        )

    def load(self) -> EngineLoad:
        return EngineLoad(
            queued_tokens=self._admission.queue.prompt_tokens + sum(a.uncomputed_tokens for a in self._prefilling),
            queued_sequences=len(self._admission.queue),
            running_sequences=len(self._running) + len(self._prefilling),
            free_blocks=self.blocks.free_blocks,
            cached_blocks=self.blocks.cached_blocks,
            total_blocks=self.blocks.total_blocks,
            tokens_per_s=self._speed.tokens_per_s,
        )

    def apply(self, command: Command) -> None:
        """Take a command; what comes of it is in the next outcome.

        Raises:
            IllegalTransition: the attempt is held already, or has no reservation to commit: the caller's defect.
        """
        match command:
            case Prefill(group, then_decode):
                self._enqueue(command, group, prefills=True, decodes=then_decode)
            case Reserve(group):
                self._enqueue(command, group, prefills=False, decodes=True)
            case Commit(key, first_tokens):
                self._start_decoding(command, key, first_tokens)
            case Stop(key, siblings):
                self._stop(key, siblings)
            case Release(key):
                self._release(key)

    def plan(self) -> StepPlan:
        """Decide: admit whom there is room for, and lay out the next step."""
        self._plan_start_s = self._clock()
        self._planned = list(self._running)
        slices = [decode_slice(sequence) for sequence in self._running]
        copies = take_copies(self._running)
        budget = PromptBudget(self._settings.step_tokens - len(slices))
        slices += (self._plan_prompt(attempt, budget) for attempt in self._prefilling if budget.room(attempt) > 0)
        while (head := self._admission.queue.first()) is not None and self._admission.may_admit:
            if (head.prefills and budget.room(head) == 0) or not self._admission.admit(head):
                break
            self._start(head)
            if head.prefills:
                slices.append(self._plan_prompt(head, budget))
        self._plan = StepPlan(tuple(slices), tuple(copies))
        return self._plan

    def handed_over(self, plan: StepPlan) -> list[Progress]:
        """Where the last plan takes the prompts that decode elsewhere."""
        return [
            Progress(planned.group.key, part.end, tuple(planned.prompt_block_ids))
            for planned, part in zip(self._planned, plan.slices, strict=True)
            if isinstance(planned, Attempt) and not planned.decodes
        ]

    def commit(self, plan: StepPlan, sampled: Sequence[Sequence[Sampled]]) -> StepOutcome:
        """Learn what the last plan's slices gave, one list for each; returns all that happened since the last outcome.

        Raises:
            ValueError: it is not the last plan, or the results do not fit it.
        """
        wanted = [part.num_scored + len(part.samples) for part in plan.slices]
        if plan is not self._plan or [len(row) for row in sampled] != wanted:
            raise ValueError("the results are not those of the last plan")
        now_s = self._clock()
        self._speed.measure(self._prompt_tokens(plan), now_s - self._plan_start_s)
        for planned, part, row in zip(self._planned, plan.slices, sampled, strict=True):
            attempt = _attempt_of(planned)
            if NO_TOKEN in row:
                self._fail_computing(attempt, _NOT_NUMBERS)
            elif attempt.phase is Phase.STOPPED:
                # A sibling has just failed.
                continue
            elif isinstance(planned, RunningSequence):
                self._learn_token(planned, row[0], now_s)
            else:
                self._learn_chunk(attempt, part, row, now_s)
        return self._take_outcome()

    def fail(self, plan: StepPlan, error: PdserveError) -> StepOutcome:
        """Learn that the last plan could not be run: every attempt in it has failed."""
        if plan is not self._plan:
            raise ValueError("it is not the last plan")
        for planned in self._planned:
            self._fail_computing(_attempt_of(planned), error)
        return self._take_outcome()

    def check(self) -> None:
        """Compare every table with every other; for tests. Costs as much as the pool is large.

        Raises:
            AssertionError: names the first difference.
        """
        self._admission.check(self.attempts.values())
        by_phase = {phase: [a for a in self.attempts.values() if a.phase is phase] for phase in Phase}
        if set(self._prefilling) != set(by_phase[Phase.PREFILLING]):
            raise AssertionError("the prompts under way are not those of the attempts")
        if set(self._running) != {a.sequences[i] for a in by_phase[Phase.RUNNING] for i in a.live}:
            raise AssertionError("the running sequences are not those of the attempts")

    def _fail_computing(self, attempt: Attempt, error: PdserveError) -> None:
        if attempt.phase in (Phase.PREFILLING, Phase.RUNNING):
            self._fail(attempt, error)

    def _plan_prompt(self, attempt: Attempt, budget: PromptBudget) -> SequenceSlice:
        part = prompt_slice(attempt, budget.room(attempt))
        budget.spend(part)
        self._planned.append(attempt)
        return part

    def _enqueue(self, command: Command, group: Group, *, prefills: bool, decodes: bool) -> None:
        held = self.attempts.get(group.key)
        if held is not None:
            raise IllegalTransition(held.phase, command)
        attempt = Attempt.of(
            group, self._geometry, self._max_context_tokens, prefills=prefills, decodes=decodes, now_s=self._clock()
        )
        error = self._admission.refusal(attempt)
        if error is not None:
            self._outcome.failed.append(Failed(group.key, error))
            return
        self.attempts[group.key] = attempt
        self._admission.enqueue(attempt)

    def _start(self, attempt: Attempt) -> None:
        """Carry on with an attempt that was just admitted."""
        key = attempt.group.key
        if not attempt.prefills:
            attempt.phase = Phase.RESERVED
            self._outcome.granted.append(Granted(key, tuple(attempt.prompt_block_ids), attempt.cached_tokens))
            return
        attempt.phase = Phase.PREFILLING
        self._prefilling[attempt] = None
        self._outcome.stages.append(StageReport(key, Stage.QUEUE, self._plan_start_s - attempt.stage_start_s))
        attempt.stage_start_s = self._plan_start_s

    def _start_decoding(self, command: Command, key: AttemptKey, first_tokens: Sequence[Token]) -> None:
        attempt = self.attempts.get(key)
        if attempt is None or attempt.phase is Phase.STOPPED:
            return
        if attempt.phase is not Phase.RESERVED:
            raise IllegalTransition(attempt.phase, command)
        first_token_of = {token.sibling: token for token in first_tokens if token.position == attempt.num_tokens}
        if not first_token_of.keys() >= set(attempt.live):
            wanted = f"siblings {attempt.live} at position {attempt.num_tokens}"
            self._fail(attempt, PdserveError(ErrorCode.protocol_violation, f"first tokens must be those of {wanted}"))
            return
        attempt.computed_tokens = attempt.num_tokens
        attempt.enter_prompt_blocks(self.blocks, self._geometry.block_size)
        tokens = [first_token_of[sibling] for sibling in attempt.live]
        # Prefill saw no end in these, but its context may be longer than this engine's.
        tokens = [t._replace(finish=attempt.finish_reason(t.token_id, t.position)) for t in tokens]
        self._outcome.tokens.extend(tokens)
        self._run(attempt, [token for token in tokens if token.finish is None], self._clock())

    def _run(self, attempt: Attempt, first_tokens: Sequence[Token], now_s: float) -> None:
        """Let the siblings that their first tokens did not end decode."""
        attempt.phase = Phase.RUNNING
        attempt.stage_start_s = now_s
        attempt.live = [token.sibling for token in first_tokens]
        for sequence in fork(attempt, first_tokens, self.blocks):
            self._running[sequence] = None
        self._admission.resize(attempt, len(attempt.live))
        if not attempt.live:
            self._forget(attempt)

    def _stop(self, key: AttemptKey, siblings: frozenset[int] | None) -> None:
        attempt = self.attempts.get(key)
        if attempt is None or attempt.phase in (Phase.PREFILLED, Phase.STOPPED):
            return
        for sibling in [sibling for sibling in attempt.live if siblings is None or sibling in siblings]:
            attempt.live.remove(sibling)
            if attempt.phase is Phase.RUNNING:
                del self._running[attempt.sequences[sibling]]
        # Who waits takes no places yet, but may fit now that it is smaller.
        self._admission.resize(attempt, 0 if attempt.phase is Phase.WAITING else attempt.slots_wanted)
        if attempt.live:
            return
        if attempt.phase is Phase.WAITING:
            self._admission.withdraw(attempt)
            del self.attempts[key]
        self._prefilling.pop(attempt, None)
        attempt.phase = Phase.STOPPED

    def _release(self, key: AttemptKey) -> None:
        self._stop(key, None)
        attempt = self.attempts.get(key)
        if attempt is not None:
            self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        self._admission.free(attempt)
        del self.attempts[attempt.group.key]

    def _fail(self, attempt: Attempt, error: PdserveError) -> None:
        self._outcome.failed.append(Failed(attempt.group.key, error))
        self._stop(attempt.group.key, None)

    def _learn_chunk(self, attempt: Attempt, part: SequenceSlice, row: Sequence[Sampled], now_s: float) -> None:
        key = attempt.group.key
        attempt.computed_tokens = part.end
        attempt.enter_prompt_blocks(self.blocks, self._geometry.block_size)
        self._outcome.progress.append(Progress(key, part.end, tuple(attempt.prompt_block_ids)))
        if part.num_scored:
            scored = tuple(result.logprobs for result in row[: part.num_scored] if result.logprobs is not None)
            self._outcome.prompt_logprobs.append(PromptLogprobs(key, part.start + 1, scored))
        if part.end < attempt.num_tokens:
            return
        del self._prefilling[attempt]
        first_tokens = [
            attempt.token(spec.sibling, spec.position, result)
            for spec, result in zip(part.samples, row[part.num_scored :], strict=True)
        ]
        self._outcome.tokens.extend(first_tokens)
        seconds = now_s - attempt.stage_start_s
        self._outcome.stages.append(StageReport(key, Stage.PREFILL, seconds, attempt.cached_tokens))
        if attempt.decodes:
            self._run(attempt, [token for token in first_tokens if token.finish is None], now_s)
        else:
            attempt.phase = Phase.PREFILLED
            self._admission.resize(attempt, 0)

    def _learn_token(self, sequence: RunningSequence, result: Sampled, now_s: float) -> None:
        attempt, position = sequence.attempt, sequence.num_tokens
        if not attempt.stepped:
            attempt.stepped = True
            stage_s = now_s - attempt.stage_start_s
            self._outcome.stages.append(StageReport(attempt.group.key, Stage.FIRST_STEP, stage_s))
        sequence.enter_filled_block(self.blocks, self._geometry.block_size)
        token = attempt.token(sequence.sibling, position, result)
        self._outcome.tokens.append(token)
        if token.finish is None:
            sequence.token_ids[position] = token.token_id
            sequence.num_tokens += 1
        else:
            self._end(sequence)

    def _end(self, sequence: RunningSequence) -> None:
        """A token rule ended it: its blocks are free at once, and the group's with its last running sibling."""
        attempt = sequence.attempt
        del self._running[sequence]
        del attempt.sequences[sequence.sibling]
        attempt.live.remove(sequence.sibling)
        self.blocks.free(sequence.block_ids)
        self._admission.resize(attempt, len(attempt.live))
        if not attempt.live:
            self._forget(attempt)

    def _prompt_tokens(self, plan: StepPlan) -> int:
        return sum(
            len(part.token_ids)
            for planned, part in zip(self._planned, plan.slices, strict=True)
            if isinstance(planned, Attempt)
        )

    def _take_outcome(self) -> StepOutcome:
        outcome = replace(self._outcome, load=self.load())
        self._outcome = StepOutcome()
        self._planned = []
        return outcome


def _attempt_of(planned: Attempt | RunningSequence) -> Attempt:
    return planned.attempt if isinstance(planned, RunningSequence) else planned
