"""Logits to tokens: one vectorized pass over a batch in which every row may ask for something else.
This module decides how a token is drawn. It does not know requests or their past: rows of logits and of parameters."""

from hashlib import blake2b

import numpy as np
import torch

from nanoserve.request import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM
ROUNDING = 1e-6  # top_p counts as reached when float32 logits cannot tell
NOISE_STEP = 2**-24  # the resolution of float32 noise: with a noise of 0, any token would win

# What is read of a request's SamplingParams in each step, as an element of an array; logprobs -1: not asked for.
ROW = np.dtype("f4, f4, i8, f8, u8, ?, i4", align=True)
ROW.names = ("temperature", "min_p", "top_k", "top_p", "seed", "seeded", "logprobs")


def sampling_row(params: SamplingParams) -> tuple:
    seed, logprobs = params.seed, -1 if params.logprobs is None else params.logprobs
    return params.temperature, params.min_p, params.top_k, params.top_p, (seed or 0) % 2**64, seed is not None, logprobs


def sample(logits: torch.Tensor, asked: np.ndarray, positions: np.ndarray, generator: torch.Generator) -> torch.Tensor:
    """One token id per row of logits [num_rows, vocab_size], which stay as they are: [num_rows] int64, -1 where the
    largest logit is no finite number. asked[r], a ROW, is what row r wants, positions[r] where its token goes. Dividing
    probabilities by exponential noise and taking the largest draws token i with probability p_i, never if p_i is 0. A
    seeded row's noise depends on seed and position alone, so its tokens are the same alone, in any batch, in chunks and
    after preemption. A draft is accepted if it is the token drawn in its place: all are drawn as without drafts."""
    rows = np.flatnonzero(asked["temperature"] >= GREEDY_BELOW)
    largest, likeliest = logits.max(dim=-1)
    likeliest.masked_fill_(~largest.isfinite(), -1)
    if not len(rows):
        return likeliest

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)

    asked, positions, index, vocab_size = asked[rows, None], positions[rows], tensor(rows), logits.shape[1]
    logits, largest = (logits[index], largest[index]) if len(rows) < len(logits) else (logits, largest)
    # In float32, and with the largest at 0: no temperature is small enough to overflow.
    weights = (logits - largest[:, None].float()).div_(tensor(asked["temperature"]))
    if asked["min_p"].any():
        weights.masked_fill_(weights < tensor(asked["min_p"]).log_(), -torch.inf)
    top_k = np.where((asked["top_k"] > 0) & (asked["top_k"] < vocab_size), asked["top_k"], vocab_size)
    top_p = np.where(asked["top_p"] < 1, asked["top_p"] * (1 - ROUNDING), np.inf)
    for group in (np.flatnonzero(top_k < vocab_size), np.flatnonzero((top_k == vocab_size) & (top_p < 1))):
        if len(group):
            place, goal = tensor(group), tensor(top_p[group]) if top_p[group].min() < 1 else None
            weights[place] = _keep_likeliest(weights[place], int(top_k[group].max()), tensor(top_k[group]), goal)
    noise, own = torch.empty_like(weights).uniform_(generator=generator), torch.Generator(logits.device)
    for i in np.flatnonzero(asked["seeded"]).tolist():
        # A hash, since torch's CPU generator looks at the low 32 bits of a seed only.
        draw = blake2b(b"%d %d" % (asked["seed"][i, 0], positions[i]), digest_size=8)
        noise[i].uniform_(generator=own.manual_seed(int.from_bytes(draw.digest(), "little")))
    # -log of uniform noise is exponential; its sign is left to argmin.
    sampled = weights.exp_().div_(noise.log_().clamp_(-1 / NOISE_STEP, -NOISE_STEP)).argmin(dim=-1)
    return likeliest.index_copy_(0, index, sampled.masked_fill_(~largest.isfinite(), -1))


def _keep_likeliest(logits: torch.Tensor, width: int, top_k: torch.Tensor, top_p: torch.Tensor | None) -> torch.Tensor:
    """Put -inf, in place, where top_k and then top_p exclude a token (the order of vLLM v1/sample/sampler.py); `width`
    is the largest top_k, or the vocabulary. All that tie with the k-th are kept, as in vLLM and transformers; of those
    that tie at the end of top_p's smallest set only the lower ids, so that a tiny top_p leaves argmax's."""
    if width < logits.shape[1]:
        ordered = logits.topk(width).values
        logits.masked_fill_(logits < ordered.gather(1, top_k - 1), -torch.inf)
    elif logits.device.type == "cpu":  # NumPy sorts bare values in a half to a third of the time
        ordered = torch.from_numpy(np.sort(logits.neg().numpy())).neg_()
    else:
        ordered = logits.sort(descending=True).values
    if top_p is None:
        return logits
    # Sums in float64: in float32, 150,000 terms err by more than a rare token's share, and differently in each batch.
    weights = ordered.exp()
    goal = top_p * logits.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    before = weights.cumsum(dim=-1, dtype=torch.float64).sub_(weights)
    num_kept = (before < goal).sum(dim=-1, keepdim=True).clamp_(min=1)  # the token that crosses top_p is kept
    last = ordered.gather(1, num_kept - 1)
    above = before.gather(1, (ordered > last).sum(dim=-1, keepdim=True))
    num_ties = ((goal - above) / last.exp()).ceil_().clamp_(max=logits.shape[1]).int()
    ties = logits == last
    return logits.masked_fill_((logits < last) | ties & (ties.cumsum(dim=-1, dtype=torch.int32) > num_ties), -torch.inf)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> tuple[torch.Tensor, ...]:
    """Ids and log-probabilities [num_rows, 1 + num_logprobs], the given token first and then the likeliest, and its
    rank [num_rows], 1 being the likeliest. The distribution is the model's own, before temperature (vLLM's default)."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    values, ids = logprobs.topk(min(num_logprobs, logits.shape[1]), dim=-1)
    rank = (logprobs >= chosen).sum(dim=-1)  # of tokens that tie the last one's, as in vLLM
    return torch.cat((token_ids[:, None], ids), dim=1), torch.cat((chosen, values), dim=1), rank
