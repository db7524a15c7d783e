"""Logits to tokens: one vectorized pass over a batch in which every row may ask for something else.

This module decides how a token is drawn. It does not know requests or positions: rows of logits, rows of parameters.
"""

from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.request import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of the rows that sample, as tensors [num_rows]; None where no row asks for it."""

    greedy: torch.Tensor | None  # None: every row is greedy
    temperature: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    seeds: tuple[tuple[int, int], ...]  # (row, seed) of the rows that brought a seed
    num_logprobs: int | None  # the most any row asks for


def make_sampling_batch(
    params: list[SamplingParams], positions: list[int], vocab_size: int, device: torch.device
) -> SamplingBatch:
    """Lay out the rows' parameters; positions[r] is where row r's token goes in its request.

    A seeded row's randomness is a function of its seed and that position alone: the same alone, in any batch, in chunks,
    after preemption, and when a step is run again.
    """
    logprobs = [p.logprobs for p in params if p.logprobs is not None]
    num_logprobs = max(logprobs) if logprobs else None
    temperature = np.array([p.temperature for p in params], dtype=np.float32)
    if (temperature < GREEDY_BELOW).all():
        return SamplingBatch(None, None, None, None, None, (), num_logprobs)

    def column(values: list, off: float, dtype: type) -> torch.Tensor | None:
        array = np.array(values, dtype=dtype)
        return None if (array == off).all() else torch.from_numpy(array).to(device)

    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    seeds = tuple(
        (row, (p.seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) % 2**63)
        for row, (p, position) in enumerate(zip(params, positions, strict=True))
        if p.seed is not None
    )
    return SamplingBatch(
        greedy=torch.from_numpy(temperature < GREEDY_BELOW).to(device),
        temperature=torch.from_numpy(np.where(temperature < GREEDY_BELOW, 1, temperature)).to(device),
        top_k=column(top_k, vocab_size, np.int64),
        top_p=column([p.top_p for p in params], 1.0, np.float32),
        min_p=column([p.min_p for p in params], 0.0, np.float32),
        seeds=seeds,
        num_logprobs=num_logprobs,
    )


def sample(logits: torch.Tensor, batch: SamplingBatch, generator: torch.Generator) -> torch.Tensor:
    """One token id per row of logits [num_rows, vocab_size]; [num_rows] int64.

    A row is drawn by dividing its probabilities by exponential noise and taking the largest, which picks token i with
    probability p_i and never one of probability 0.
    """
    greedy_ids = logits.argmax(dim=-1)
    if batch.greedy is None:
        return greedy_ids
    probs = _filter(logits.float() / batch.temperature[:, None], batch).softmax(dim=-1)
    noise = torch.empty_like(probs).exponential_(generator=generator)
    for row, seed in batch.seeds:
        noise[row].exponential_(generator=torch.Generator(logits.device).manual_seed(seed))
    sampled_ids = probs.div_(noise.clamp_min_(torch.finfo(noise.dtype).tiny)).argmax(dim=-1)
    return torch.where(batch.greedy, greedy_ids, sampled_ids)


def _filter(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Put -inf where min_p, top_k or top_p, in this order (vLLM v1/sample/sampler.py), exclude a token."""
    if batch.min_p is not None:
        floor = logits.amax(dim=-1, keepdim=True) + batch.min_p.log()[:, None]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if batch.top_k is None and batch.top_p is None:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    if batch.top_k is not None:
        kth = ordered.gather(1, batch.top_k[:, None] - 1)
        ordered = ordered.masked_fill(ordered < kth, float("-inf"))
    if batch.top_p is not None:
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # the token that crosses top_p is kept
        ordered = ordered.masked_fill(before >= batch.top_p[:, None], float("-inf"))
    return torch.empty_like(logits).scatter_(1, index, ordered)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> tuple[torch.Tensor, ...]:
    """Log-probabilities under the model's own distribution, before temperature (vLLM's default, "raw_logprobs").

    Returns ids and logprobs [num_rows, 1 + num_logprobs], the given token first and then the likeliest, and its rank
    [num_rows], 1 being the likeliest.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    values, ids = logprobs.topk(min(num_logprobs, logits.shape[1]), dim=-1)
    rank = (logprobs > chosen).sum(dim=-1) + 1
    return torch.cat((token_ids[:, None], ids), dim=1), torch.cat((chosen, values), dim=1), rank
