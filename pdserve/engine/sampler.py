"""Choosing tokens for a batch: a pure function of logits, parameters and the token ids before.

The order is that of the field: bias, penalties, forbidden stop ids; then temperature, top_k, top_p, min_p, each over what
the ones before it left. The token is drawn by inverse CDF over ids in rising order, with one number that depends only on
seed, sibling and position, so a replay draws the same token wherever and beside whomever it runs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.core.events import TokenLogprobs
from pdserve.core.randomness import uniform
from pdserve.core.sampling import SamplingParams
from pdserve.engine.work import NO_TOKEN, Sampled, SampleSpec, ScoreSpec

# Up to here selecting is faster than sorting.
_SMALL_TOP_K = 256


def sample(logits: Tensor, requests: Sequence[tuple[int, SampleSpec]]) -> list[Sampled]:
    """Samples one token for each request.

    Args:
        logits: [rows, vocab], any float dtype; unchanged. Siblings at the end of their prompt share a row.
        requests: (row of `logits`, what to sample from it)
    Returns: NO_TOKEN for a row that holds a NaN, which is what a model's arithmetic makes when it overflows.
    """
    if not requests:
        return []
    rows = torch.tensor([row for row, _ in requests], device=logits.device)
    specs = [spec for _, spec in requests]
    if all(_is_plain_greedy(spec) for spec in specs):
        best, broken = _best_ids(logits)
        return [
            NO_TOKEN if is_broken else Sampled(token_id)
            for token_id, is_broken in zip(best[rows].tolist(), broken[rows].tolist(), strict=True)
        ]
    raw = logits[rows].float()
    adjusted = _adjust(raw, specs)
    chosen, broken = _best_ids(adjusted)
    drawn = [index for index, spec in enumerate(specs) if not spec.params.greedy and not broken[index]]
    if drawn:
        chosen[drawn] = _draw(adjusted[drawn], [specs[index] for index in drawn])
    token_ids: list[int] = chosen.tolist()
    logprobs = _logprobs(raw, token_ids, [spec.params.top_logprobs for spec in specs])
    return [
        NO_TOKEN if is_broken else Sampled(token_id, logprob)
        for token_id, logprob, is_broken in zip(token_ids, logprobs, broken.tolist(), strict=True)
    ]


def score(logits: Tensor, specs: Sequence[ScoreSpec]) -> list[Sampled]:
    """Log-probabilities of tokens that are given.

    Args:
        logits: [scored, vocab], any float dtype, a row for each token of all specs together; unchanged.
    """
    if not specs:
        return []
    token_ids = [int(token_id) for spec in specs for token_id in spec.token_ids]
    counts = [spec.top_logprobs for spec in specs for _ in spec.token_ids]
    return list(map(Sampled, token_ids, _logprobs(logits.float(), token_ids, counts)))


def _is_plain_greedy(spec: SampleSpec) -> bool:
    return spec.params.greedy and spec.params.top_logprobs is None and not _is_adjusted(spec)


def _is_adjusted(spec: SampleSpec) -> bool:
    return spec.params.needs_history or bool(spec.params.logit_bias) or _forbids_stop(spec)


def _forbids_stop(spec: SampleSpec) -> bool:
    return bool(spec.params.stop_ids) and spec.num_output_tokens < spec.params.min_tokens


def _best_ids(logits: Tensor) -> tuple[Tensor, Tensor]:
    """([rows] ids of the highest logits, [rows] whether there is a NaN).

    Of equal logits the lowest id counts, which is what torch's argmax documents; NaN counts as higher than any.
    """
    best = logits.argmax(dim=-1)
    return best, logits.gather(-1, best[:, None])[:, 0].isnan()


def _adjust(raw: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """[rows, vocab] logits after bias, penalties and min_tokens; `raw` itself if there are none."""
    if not any(_is_adjusted(spec) for spec in specs):
        return raw
    adjusted = raw.clone()
    for row, spec in zip(adjusted, specs, strict=True):
        _add_bias(row, spec.params)
        if spec.params.needs_history:
            _penalise(row, spec)
        if _forbids_stop(spec):
            row[_known_ids(spec.params.stop_ids, row)] = -torch.inf
    return adjusted


def _known_ids(token_ids: Sequence[int] | frozenset[int], row: Tensor) -> Tensor:
    """Ids beyond the model's vocabulary can never be chosen, so they need no adjustment."""
    return torch.tensor([i for i in token_ids if i < row.shape[0]], dtype=torch.int64, device=row.device)


def _add_bias(row: Tensor, params: SamplingParams) -> None:
    for token_id, bias in params.logit_bias.items():
        if token_id < row.shape[0]:
            row[token_id] += bias


def _penalise(row: Tensor, spec: SampleSpec) -> None:
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(spec.token_ids).astype(np.int64)).to(row.device)
        logits = row[seen]
        row[seen] = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    output_ids, counts = np.unique(spec.token_ids[spec.prompt_tokens :], return_counts=True)
    if len(output_ids):
        amounts = params.presence_penalty + params.frequency_penalty * counts
        row[torch.from_numpy(output_ids.astype(np.int64)).to(row.device)] -= torch.from_numpy(amounts).to(row)


def _draw(adjusted: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """[rows] token ids drawn from [rows, vocab] adjusted logits."""
    temperatures = torch.tensor([spec.params.temperature for spec in specs], device=adjusted.device)
    # The best logit is moved to 0 first: dividing by a tiny temperature must not make two infinities.
    scaled = (adjusted - adjusted.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    probabilities = torch.softmax(scaled, dim=-1)
    return torch.stack([_draw_one(row, spec) for row, spec in zip(probabilities, specs, strict=True)])


def _draw_one(row: Tensor, spec: SampleSpec) -> Tensor:
    """[] the token id drawn from probabilities, [vocab]."""
    token_ids = _kept_ids(row, spec.params)
    cumulative = (row if token_ids is None else row[token_ids]).cumsum(dim=0, dtype=torch.float64)
    total = cumulative[-1]
    # Rounding must not lift the target to the total, where no id is left to the right.
    target = (uniform(spec.seed, spec.sibling, spec.position) * total).minimum(total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True)
    return index if token_ids is None else token_ids[index]


def _kept_ids(row: Tensor, params: SamplingParams) -> Tensor | None:
    """[kept] what top_k, top_p and min_p leave of a row of probabilities, in rising order; None if all of it."""
    top_k = params.top_k if 0 < params.top_k < row.shape[0] else row.shape[0]
    if top_k == row.shape[0] and params.top_p == 1.0:
        return (row >= params.min_p * row.max()).nonzero()[:, 0] if params.min_p else None
    falling = _highest(row, top_k)
    count = top_k
    if params.top_p < 1.0:
        mass = falling.cumsum(dim=0, dtype=torch.float64)
        # The token that completes the nucleus belongs to it.
        count = min(top_k, int((mass < params.top_p * mass[-1]).sum()) + 1)
    if params.min_p:
        count = min(count, int((falling >= params.min_p * falling[0]).sum()))
    above = (row > falling[count - 1]).nonzero()[:, 0]
    # Of equally probable tokens the lowest ids are kept.
    equal = (row == falling[count - 1]).nonzero()[: count - len(above), 0]
    return torch.cat((above, equal)).sort().values


def _highest(row: Tensor, count: int) -> Tensor:
    """[count] the highest values of a row, falling."""
    if count <= _SMALL_TOP_K:
        return row.topk(count).values
    # On a CPU numpy sorts ten times faster than torch.
    if row.device.type == "cpu":
        return torch.from_numpy(np.sort(row.numpy())[::-1][:count].copy())
    return row.sort(descending=True).values[:count]


def _logprobs(raw: Tensor, token_ids: Sequence[int], counts: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """For each row of [rows, vocab] unadjusted logits the chosen token's log-probability and the best ones'."""
    result: list[TokenLogprobs | None] = [None] * len(token_ids)
    asked = [index for index, count in enumerate(counts) if count is not None]
    if not asked:
        return result
    logprobs = torch.log_softmax(raw[asked], dim=-1)
    best = logprobs.topk(min(max(counts[index] or 0 for index in asked), raw.shape[1]), dim=-1)
    for row, index in enumerate(asked):
        count = counts[index] or 0
        result[index] = TokenLogprobs(
            logprob=float(logprobs[row, token_ids[index]]),
            top_ids=tuple(best.indices[row, :count].tolist()),
            top_logprobs=tuple(best.values[row, :count].tolist()),
        )
    return result
