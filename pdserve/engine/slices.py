"""What attempts and sequences contribute to a step."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.engine.attempt import Attempt, RunningSequence
from pdserve.engine.work import BlockCopy, SampleSpec, ScoreSpec, SequenceSlice


def take_copies(running: Iterable[RunningSequence]) -> list[BlockCopy]:
    """The copies to be made before this step, for the sequences that have their first."""
    copies = []
    for sequence in running:
        if sequence.copy is not None:
            copies.append(sequence.copy)
            sequence.copy = None
    return copies


def decode_slice(sequence: RunningSequence) -> SequenceSlice:
    """The sequence's last token, whose keys and values are the only ones not in the cache yet."""
    group, end = sequence.attempt.group, sequence.num_tokens
    sample = SampleSpec(
        params=group.params,
        seed=group.seed,
        sibling=sequence.sibling,
        position=end,
        token_ids=sequence.token_ids[:end],
        prompt_tokens=group.prompt_tokens,
    )
    return SequenceSlice(sequence.token_ids[end - 1 : end], end - 1, sequence.block_ids, (sample,))


@dataclass(slots=True)
class PromptBudget:
    """What a step may still compute of prompts, in tokens.

    A scored token costs a row of logits, [vocab] floats, so a step has fewer of them.
    """

    tokens: int
    scored_tokens: int = 256

    def room(self, attempt: Attempt) -> int:
        return min(self.tokens, self.scored_tokens) if attempt.scores_prompt else self.tokens

    def spend(self, part: SequenceSlice) -> None:
        self.tokens -= len(part.token_ids)
        self.scored_tokens -= part.num_scored


def prompt_slice(attempt: Attempt, budget_tokens: int) -> SequenceSlice:
    """The prompt's next chunk; with its last one, a sample for every live sibling."""
    group, start = attempt.group, attempt.computed_tokens
    end = min(start + budget_tokens, attempt.num_tokens)
    samples = tuple(
        SampleSpec(
            params=group.params,
            seed=group.seed,
            sibling=sibling,
            position=end,
            token_ids=group.token_ids,
            prompt_tokens=group.prompt_tokens,
        )
        for sibling in attempt.live
        if end == attempt.num_tokens
    )
    return SequenceSlice(group.token_ids[start:end], start, attempt.prompt_block_ids, samples, _scores(attempt, end))


def _scores(attempt: Attempt, end: int) -> ScoreSpec | None:
    """What a chunk up to `end` scores: the position before a token holds its log-probability; replayed output has none."""
    group, start = attempt.group, attempt.computed_tokens
    last = min(end + 1, group.prompt_tokens)
    if not attempt.scores_prompt or last <= start + 1:
        return None
    return ScoreSpec(group.token_ids[start + 1 : last], group.params.prompt_logprobs or 0)
