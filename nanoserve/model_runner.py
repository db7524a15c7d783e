"""A SchedulerOutput to tensors, one forward pass, sampled tokens back.

This module decides how a step's shares are laid out for the device and how many K/V blocks fit. It does not decide who
is computed, and sees requests only as the scheduler's frozen shares.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from nanoserve.attention import AttentionMetadata, attend_torch, group_rows, select_backend
from nanoserve.block_manager import cdiv
from nanoserve.config import EngineConfig
from nanoserve.loader import load_model
from nanoserve.model import get_head_dim
from nanoserve.sampler import gather_logprobs, make_sampling_batch, sample
from nanoserve.scheduler import ScheduledRequest, SchedulerOutput

GiB = 1 << 30
CPU_CACHE_BYTES = 4 * GiB


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprobs of one sampled token: ids and values, the sampled one first, then the likeliest; its rank."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step produced, one entry per scheduled request, in scheduling order."""

    sampled_token_ids: list[list[int]]  # [] for an unfinished prompt
    logprobs: list[list[TokenLogprobs]]  # as sampled_token_ids; [] where nobody asked


class ModelRunner:
    """Holds the weights, the K/V caches and the rows' block tables (vLLM v1/worker/gpu_model_runner.py).

    Raises ValueError where the model, the device and the options do not go together. `num_blocks` is what fits.
    """

    def __init__(self, config: EngineConfig, folder: Path):
        hf_config = config.hf_config
        self.device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = self._choose_dtype(config)
        head_dim = get_head_dim(hf_config)
        self.backend = select_backend(config.attention_backend, config.block_size, self.device, self.dtype, head_dim)
        self.block_size = config.block_size or self.backend.block_size
        self.max_model_len = config.max_model_len
        self.vocab_size = config.vocab_size
        self.group_size = hf_config.num_attention_heads // hf_config.num_key_value_heads
        self.model = load_model(
            folder,
            hf_config,
            self.backend.attend,
            self.max_model_len,
            self.dtype,
            self.device,
            dummy=config.load_format == "dummy",
        )
        block_shape = (self.block_size, hf_config.num_key_value_heads, head_dim)
        self.block_bytes = 2 * hf_config.num_hidden_layers * int(np.prod(block_shape)) * self.dtype.itemsize
        self.num_blocks = config.num_gpu_blocks_override or self._fit_blocks(config)
        # Zeros, not garbage: a masked key weighs 0, but 0 times NaN is NaN.
        self.kv_caches = [
            torch.zeros(2, self.num_blocks, *block_shape, dtype=self.dtype, device=self.device)
            for _ in range(hf_config.num_hidden_layers)
        ]
        self.generator = torch.Generator(self.device).manual_seed(config.seed % 2**63)
        self._table = np.zeros((config.max_num_seqs, cdiv(self.max_model_len, self.block_size)), dtype=np.int32)
        self._table_len = [0] * config.max_num_seqs  # blocks of each row already in _table
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(config.max_num_seqs))

    def _choose_dtype(self, config: EngineConfig) -> torch.dtype:
        name = config.dtype
        if name == "auto":
            stored = config.hf_config.dtype or torch.float32
            name = "float32" if self.device.type == "cpu" else str(stored).removeprefix("torch.")
        return getattr(torch, name)

    def _fit_blocks(self, config: EngineConfig) -> int:
        """How many blocks fit in memory. Raises ValueError with the numbers if one max_model_len request does not."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            space = int(free - total * (1 - config.gpu_memory_utilization))
        else:
            space = min(CPU_CACHE_BYTES, _available_memory() // 4)
        num_wanted = cdiv(self.max_model_len, self.block_size)
        num_blocks = min(space // self.block_bytes, config.max_num_seqs * num_wanted)
        if num_blocks < num_wanted:
            raise ValueError(
                f"one request of max_model_len={self.max_model_len} needs "
                f"{num_wanted * self.block_bytes / GiB:.2f} GiB of K/V cache, there is room for "
                f"{max(space, 0) / GiB:.2f} GiB: lower max_model_len or raise "
                f"gpu_memory_utilization={config.gpu_memory_utilization}"
            )
        return num_blocks

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: K/V of every share is written, and the shares that reached their end sample."""
        self._update_rows(output)
        if not output.scheduled:
            return ModelRunnerOutput([], [])
        input_ids, positions, metadata = self._prepare(output.scheduled)
        hidden_states = self.model(input_ids, positions, self.kv_caches, metadata)
        return self._sample(output.scheduled, hidden_states)

    def _update_rows(self, output: SchedulerOutput) -> None:
        """Keep one row of the block table per running request; blocks are only ever appended to it."""
        for request_id in output.preempted_req_ids | output.finished_req_ids:
            if request_id in self._rows:
                row = self._rows.pop(request_id)
                self._table_len[row] = 0
                self._free_rows.append(row)
        for share in output.scheduled:
            row = self._rows.get(share.request_id)
            if row is None:
                row = self._rows[share.request_id] = self._free_rows.pop()
            known = self._table_len[row]
            if known < len(share.block_ids):
                self._table[row, known : len(share.block_ids)] = share.block_ids[known:]
                self._table_len[row] = len(share.block_ids)

    def _prepare(self, scheduled: list[ScheduledRequest]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        num_new = np.array([len(share.token_ids) for share in scheduled])
        start = np.array([share.num_computed_tokens for share in scheduled])
        context_lens = start + num_new
        cu_seqlens_q = np.concatenate(([0], np.cumsum(num_new)))
        cu_seqlens_k = np.concatenate(([0], np.cumsum(context_lens)))
        rows = np.array([self._rows[share.request_id] for share in scheduled])
        row_of_token = np.repeat(np.arange(len(scheduled)), num_new)
        positions = np.arange(cu_seqlens_q[-1]) - np.repeat(cu_seqlens_q[:-1] - start, num_new)
        block_table = self._table[rows, : cdiv(int(context_lens.max()), self.block_size)]
        slots = block_table[row_of_token, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        input_ids = np.fromiter(chain.from_iterable(share.token_ids for share in scheduled), np.int64, len(positions))
        groups = ()
        if self.backend.attend is attend_torch:
            groups = group_rows(
                cu_seqlens_q, context_lens, block_table, self.block_size, self.group_size, self.dtype, self.device
            )
        metadata = AttentionMetadata(
            cu_seqlens_q=self._tensor(cu_seqlens_q, np.int32),
            context_lens=self._tensor(context_lens, np.int32),
            cu_seqlens_k=self._tensor(cu_seqlens_k, np.int32),
            max_seqlen_q=int(num_new.max()),
            max_seqlen_k=int(context_lens.max()),
            block_table=self._tensor(block_table, np.int32),
            slot_mapping=self._tensor(slots, np.int64),
            row_groups=groups,
        )
        return self._tensor(input_ids, np.int64), self._tensor(positions, np.int64), metadata

    def _tensor(self, array: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)).to(self.device, non_blocking=True)

    def _sample(self, scheduled: list[ScheduledRequest], hidden_states: torch.Tensor) -> ModelRunnerOutput:
        """Logits for the rows that sample only: one for each share that reached its end, one more for each draft."""
        ends = np.cumsum([len(share.token_ids) for share in scheduled])
        counts = [share.num_spec_tokens + 1 if share.is_last_chunk else 0 for share in scheduled]
        rows = [row for end, count in zip(ends.tolist(), counts, strict=True) for row in range(end - count, end)]
        if not rows:
            return ModelRunnerOutput([[] for _ in scheduled], [[] for _ in scheduled])
        params, positions = [], []
        for share, count in zip(scheduled, counts, strict=True):
            params += [share.sampling_params] * count
            end = share.num_computed_tokens + len(share.token_ids)
            positions += range(end - count + 1, end + 1)
        # Ids beyond the tokenizer's are rows of padding: no token they name can be read.
        logits = self.model.compute_logits(hidden_states[self._tensor(np.array(rows), np.int64)])[:, : self.vocab_size]
        batch = make_sampling_batch(params, positions, logits.shape[1], self.device)
        token_ids = sample(logits, batch, self.generator)
        logprobs = None
        if batch.num_logprobs is not None:
            logprobs = [t.tolist() for t in gather_logprobs(logits, token_ids, batch.num_logprobs)]
        return _split(scheduled, counts, token_ids.tolist(), logprobs)


def _split(
    scheduled: list[ScheduledRequest], counts: list[int], token_ids: list[int], logprobs: list | None
) -> ModelRunnerOutput:
    """Each share's tokens: the drafts that agree with what was sampled in their place, and one sampled token more."""
    sampled, sampled_logprobs, row = [], [], 0
    for share, count in zip(scheduled, counts, strict=True):
        drafts = share.token_ids[len(share.token_ids) - share.num_spec_tokens :]
        num_kept = min(count, 1)
        while num_kept < count and drafts[num_kept - 1] == token_ids[row + num_kept - 1]:
            num_kept += 1
        sampled.append(token_ids[row : row + num_kept])
        wanted = share.sampling_params.logprobs
        sampled_logprobs.append(
            []
            if wanted is None or logprobs is None
            else [
                TokenLogprobs(logprobs[0][r][: wanted + 1], logprobs[1][r][: wanted + 1], logprobs[2][r])
                for r in range(row, row + num_kept)
            ]
        )
        row += count
    return ModelRunnerOutput(sampled, sampled_logprobs)


def _available_memory() -> int:
    """Bytes of main memory a new allocation may take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * CPU_CACHE_BYTES
