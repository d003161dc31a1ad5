"""Each parameter against an obvious oracle in plain Python."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.randomness import uniform
from pdserve.core.sampling import SamplingParams
from pdserve.engine.sampler import sample
from pdserve.engine.work import NO_TOKEN, Sampled, SampleSpec

VOCAB = 12
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
# Quarters are exact in every dtype, and often equal.
logit_rows = st.lists(st.integers(-16, 16).map(lambda quarters: quarters / 4), min_size=VOCAB, max_size=VOCAB)
histories = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(64),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.75]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 5), st.sampled_from([-100.0, -1.0, 2.5]), max_size=3),
    stop_ids=st.frozensets(st.integers(0, VOCAB + 5), max_size=3),
    top_logprobs=st.sampled_from([None, 0, 3]),
)


def _spec(
    chosen: SamplingParams, history: list[int] | None = None, prompt_tokens: int = 1, seed: int = 0
) -> SampleSpec:
    token_ids = np.array([0] if history is None else history, np.int32)
    return SampleSpec(
        params=chosen,
        seed=seed,
        sibling=0,
        position=len(token_ids),
        token_ids=token_ids,
        prompt_tokens=min(prompt_tokens, len(token_ids)),
    )


def _slow_adjust(row: list[float], spec: SampleSpec) -> list[float]:
    chosen, everything = spec.params, spec.token_ids.tolist()
    output = everything[spec.prompt_tokens :]
    adjusted = []
    for token_id, raw in enumerate(row):
        logit = raw + chosen.logit_bias.get(token_id, 0.0)
        if token_id in everything:
            logit = logit / chosen.repetition_penalty if logit > 0 else logit * chosen.repetition_penalty
        if token_id in output:
            logit -= chosen.presence_penalty + chosen.frequency_penalty * output.count(token_id)
        if token_id in chosen.stop_ids and len(output) < chosen.min_tokens:
            logit = -math.inf
        adjusted.append(logit)
    return adjusted


def _slow_choice(row: list[float], spec: SampleSpec, nudge: float) -> int:
    """`nudge` moves every threshold by so much."""
    chosen = spec.params
    adjusted = _slow_adjust(row, spec)
    if chosen.greedy:
        return adjusted.index(max(adjusted))
    weights = [math.exp((logit - max(adjusted)) / chosen.temperature) for logit in adjusted]
    best_first = sorted(range(VOCAB), key=lambda token_id: (-round(weights[token_id], 12), token_id))
    if chosen.top_k:
        best_first = best_first[: chosen.top_k]
    if chosen.top_p < 1.0:
        total, mass, nucleus = sum(weights[i] for i in best_first), 0.0, []
        for token_id in best_first:
            nucleus.append(token_id)
            mass += weights[token_id]
            if mass / total >= chosen.top_p + nudge:
                break
        best_first = nucleus
    kept = sorted(i for i in best_first if weights[i] >= chosen.min_p * max(weights) + nudge)
    target = (uniform(spec.seed, spec.sibling, spec.position) + nudge) * sum(weights[i] for i in kept)
    mass = 0.0
    for token_id in kept:
        mass += weights[token_id]
        if mass > target:
            return token_id
    return kept[-1]


@given(row=logit_rows, chosen=params, history=histories, prompt_tokens=st.integers(1, 10), seed=st.integers(0, 2**63))
def test_equals_the_oracle(
    row: list[float], chosen: SamplingParams, history: list[int], prompt_tokens: int, seed: int
) -> None:
    spec = _spec(chosen, history, prompt_tokens, seed)
    (sampled,) = sample(torch.tensor([row]), [(0, spec)])
    assert sampled.token_id in {_slow_choice(row, spec, nudge) for nudge in (-1e-6, 0.0, 1e-6)}


@given(rows=st.lists(st.tuples(logit_rows, params, histories), min_size=1, max_size=5))
def test_a_row_is_sampled_alike_alone_and_in_a_batch(
    rows: list[tuple[list[float], SamplingParams, list[int]]],
) -> None:
    logits = torch.tensor([row for row, _, _ in rows])
    specs = [_spec(chosen, history, seed=7) for _, chosen, history in rows]
    alone = [sample(logits[i : i + 1], [(0, spec)])[0] for i, spec in enumerate(specs)]
    together = sample(logits, list(enumerate(specs)))
    assert [token.token_id for token in together] == [token.token_id for token in alone]


@given(row=logit_rows, chosen=params, history=histories)
def test_logits_are_left_as_they_are(row: list[float], chosen: SamplingParams, history: list[int]) -> None:
    logits = torch.tensor([row])
    before = logits.clone()
    sample(logits, [(0, _spec(chosen, history))])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equal_ids(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 49152, dtype=dtype)
    logits[1, [4000, 70, 48000]] = 5.0
    logits[2, [49151, 49150]] = 5.0
    assert [token.token_id for token in sample(logits, [(row, _spec(GREEDY)) for row in range(3)])] == [0, 70, 49150]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    row = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    forced = replace(GREEDY, logit_bias={3: 100.0}, top_logprobs=2)
    (sampled,) = sample(row, [(0, _spec(forced))])
    expected = torch.log_softmax(row, dim=-1)[0]
    assert sampled.token_id == 3
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(expected[3].item())
    assert sampled.logprobs.top_ids == (1, 2)
    assert sampled.logprobs.top_logprobs == pytest.approx((expected[1].item(), expected[2].item()))


def test_logprobs_come_only_to_those_that_asked() -> None:
    logits = torch.randn(1, VOCAB)
    asked = replace(GREEDY, top_logprobs=0)
    plain, bare = sample(logits, [(0, _spec(GREEDY)), (0, _spec(asked))])
    assert plain.logprobs is None
    assert bare.logprobs is not None
    assert bare.logprobs.top_ids == ()


def test_siblings_share_a_row_and_draw_their_own_numbers() -> None:
    logits = torch.zeros(1, 1000)
    hot = _spec(replace(GREEDY, temperature=1.0))
    drawn = [token.token_id for token in sample(logits, [(0, replace(hot, sibling=s)) for s in range(20)])]
    assert drawn == [int(uniform(0, sibling, 1) * 1000) for sibling in range(20)]


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    spec = _spec(replace(GREEDY, temperature=1.0))
    drawn = sample(probabilities.log()[None], [(0, replace(spec, seed=seed)) for seed in range(4000)])
    counts = np.bincount([token.token_id for token in drawn], minlength=4) / 4000
    assert counts == pytest.approx(probabilities.numpy(), abs=0.03)


def test_a_flat_distribution_has_a_wide_nucleus() -> None:
    """A flat distribution over a large vocabulary: nine tenths of the ids are the nucleus."""
    logits = torch.linspace(0, 0.01, 5000)[None]
    spec = _spec(replace(GREEDY, temperature=1.0, top_p=0.9))
    drawn = sample(logits, [(0, replace(spec, seed=seed)) for seed in range(300)])
    assert 480 < min(token.token_id for token in drawn) < 900


def test_the_nucleus_of_a_large_vocabulary() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 8
    order = logits[0].argsort(descending=True)
    mass = torch.softmax(logits[0].double(), dim=0)[order].cumsum(0)
    nucleus = set(order[: int((mass < 0.8).sum()) + 1].tolist())
    spec = _spec(replace(GREEDY, temperature=1.0, top_p=0.8))
    drawn = {token.token_id for token in sample(logits, [(0, replace(spec, seed=seed)) for seed in range(300)])}
    assert len(nucleus) > 1
    assert drawn <= nucleus


def test_ids_beyond_the_vocabulary_change_nothing() -> None:
    odd = replace(GREEDY, logit_bias={VOCAB: 5.0, 10**9: 1.0}, stop_ids=frozenset({VOCAB, 10**9}), min_tokens=3)
    assert sample(torch.arange(VOCAB).float()[None], [(0, _spec(odd))]) == [Sampled(VOCAB - 1)]


def test_nothing_to_sample() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize("chosen", [GREEDY, SamplingParams(max_tokens=64, top_p=0.9), replace(GREEDY, top_logprobs=2)])
def test_a_row_that_is_not_numbers_gives_no_token_and_spoils_no_other(chosen: SamplingParams) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = math.nan
    logits[1, 5] = 100.0
    broken, good = sample(logits, [(0, _spec(chosen)), (1, _spec(chosen))])
    assert broken == NO_TOKEN
    assert good.token_id == 5
