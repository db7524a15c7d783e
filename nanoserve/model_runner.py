"""A SchedulerOutput to tensors, one forward pass, sampled tokens back.
This module decides how a step's shares are laid out for the device and how many K/V blocks fit. It does not decide who
is computed, and sees requests only as the scheduler's frozen shares."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention import AttentionMetadata, attend_torch, group_rows, select_backend
from nanoserve.block_manager import cdiv
from nanoserve.config import EngineConfig
from nanoserve.cuda_graph import DecodeGraphs, StepShape, graph_sizes
from nanoserve.loader import load_model
from nanoserve.model import Linear, get_head_dim
from nanoserve.request import SamplingParams, blame
from nanoserve.sampler import ROW, gather_logprobs, sample, sampling_row
from nanoserve.scheduler import ScheduledRequest, SchedulerOutput

GiB = 1 << 30


class ModelRunnerOutput(NamedTuple):
    """What a step produced, one entry per scheduled request, in scheduling order."""
    sampled_token_ids: list[list[int]]  # [] for an unfinished prompt
    logprobs: list[list[tuple]]  # as sampled_token_ids, [] where nobody asked: ids, logprobs, rank of the first id


class ModelRunner:
    """Holds weights, K/V caches and block tables (vLLM v1/worker/gpu_model_runner.py). ValueError if model, device and
    options do not go together. The caches hold `num_blocks` and one more, nobody's: rows of padding write there."""
    def __init__(self, config: EngineConfig, folder: Path):
        self.device, self.dtype = _choose_device_and_dtype(config)
        head_dim, num_kv_heads = get_head_dim(config.hf_config), config.hf_config.num_key_value_heads
        self.backend = select_backend(config.attention_backend, config.block_size, self.device, self.dtype, head_dim)
        self.block_size = config.block_size or self.backend.block_size
        self.max_model_len, self.vocab_size = config.max_model_len or 0, config.vocab_size
        attend, dummy = self.backend.attend, config.load_format == "dummy"
        self.model = load_model(folder, config.hf_config, attend, self.max_model_len, self.dtype, self.device, dummy)
        self.num_layers, self.block_shape = len(self.model.model.layers), (self.block_size, num_kv_heads, head_dim)
        self.block_bytes = 2 * self.num_layers * int(np.prod(self.block_shape)) * self.dtype.itemsize
        is_cuda = self.device.type == "cuda"
        by_default = is_cuda and config.speculative_config is None
        self.async_scheduling = by_default if config.async_scheduling is None else config.async_scheduling
        self._worker = ThreadPoolExecutor(1) if self.async_scheduling and not is_cuda else None
        # A row for each running request, the last one for padding: block table and sampling parameters.
        self._table = np.zeros((config.max_num_seqs + 1, cdiv(self.max_model_len, self.block_size)), dtype=np.int32)
        self._asked = np.zeros(config.max_num_seqs, ROW)
        self.reset()
        # The last step's samples stay on the device: an input id of -1 - i stands for the i-th of them.
        self._sampled = torch.zeros(config.max_num_batched_tokens, dtype=torch.int64, device=self.device)
        self._sample_index = np.zeros(config.max_num_seqs + 1, np.int64)
        self.generator = torch.Generator(self.device)
        self.graphs: DecodeGraphs | None = None
        if is_cuda:
            self._warm_up(config)
        elif self.device.type == "cpu" and self.dtype is torch.float32 and torch.backends.mkldnn.is_available():
            for linear in [module for module in self.model.modules() if isinstance(module, Linear)]:
                linear.pack()
        self.num_blocks = config.num_gpu_blocks_override or self._fit_blocks(config)
        self.kv_caches = self._make_caches(self.num_blocks)
        self._table[-1] = self.num_blocks
        if is_cuda and not config.enforce_eager and attend is not attend_torch:
            self.capture_graphs(min(config.max_num_seqs, config.max_num_batched_tokens))
        self.generator.manual_seed(config.seed % 2**63)

    def _warm_up(self, config: EngineConfig) -> None:
        """Run the largest step there can be, to know its memory, and small ones, so that all is compiled."""
        if not config.enforce_eager:
            self.model.compile_ops()
        self.kv_caches = self._make_caches(0)
        rows, params = min(config.max_num_seqs, config.max_num_batched_tokens), SamplingParams(top_p=0.9)
        largest = min(config.max_num_batched_tokens, rows * self.max_model_len)
        # torch.compile takes two equal sizes for one, say of tokens and of heads: nothing else has the size 11.
        for num_tokens in (largest, min(largest, 11), 1, 0):  # 0 only forgets the rows
            lens = [(num_tokens + row) // rows for row in range(rows)]
            args = [(str(row), [0] * n, 0, [0] * cdiv(n, self.block_size)) for row, n in enumerate(lens) if n]
            shares = [ScheduledRequest(*arg, 0, True, params) for arg in args]
            self.execute(SchedulerOutput(shares, set(), set(self._rows), 0, 0))

    def _fit_blocks(self, config: EngineConfig) -> int:
        """How many blocks fit in memory. Raises ValueError with the numbers if one max_model_len request does not."""
        space, num_wanted = 4 * GiB, cdiv(self.max_model_len, self.block_size)  # on a CPU
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            # Weights and the largest step's activations: nothing was given back since it ran.
            ours = torch.cuda.memory_reserved(self.device)
            space = min(total * config.gpu_memory_utilization - ours, free * 0.95)
            print(f"nanoserve: of {total / GiB:.2f} GiB, weights and activations take {ours / GiB:.2f}, CUDA and other "
                  f"processes {(total - free - ours) / GiB:.2f}", file=sys.stderr)
        num_blocks = min(int(space // self.block_bytes) - 1, config.max_num_seqs * num_wanted)
        if num_blocks < num_wanted:
            need, room = num_wanted * self.block_bytes / GiB, max(space, 0) / GiB
            raise ValueError(f"one request of max_model_len={self.max_model_len} needs {need:.2f} GiB of K/V cache, "
                             f"there is room for {room:.2f}: lower it, max_num_seqs or max_num_batched_tokens, or "
                             f"raise gpu_memory_utilization={config.gpu_memory_utilization}")
        return num_blocks

    def _make_caches(self, num_blocks: int) -> list[Tensor]:
        """Zeros, not garbage: a masked key weighs 0, but 0 times NaN is NaN. Raises ValueError if memory is short."""
        shape = (2, num_blocks + 1, *self.block_shape)
        with blame(f"no room for {num_blocks} K/V blocks, lower num_gpu_blocks_override or gpu_memory_utilization"):
            return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.num_layers)]

    @torch.inference_mode()
    def capture_graphs(self, max_batch_size: int) -> None:
        """A CUDA graph for every decode-only step of up to max_batch_size requests."""
        logits = torch.empty(max_batch_size, self.model.lm_head.out_features, dtype=self.dtype, device=self.device)
        pack, run = partial(self._pack, []), partial(self._forward, ())
        self.graphs = DecodeGraphs(graph_sizes(max_batch_size), pack, run, logits)

    def _forward(self, groups: tuple, buffer: Tensor, shape: StepShape) -> Tensor:
        """Write K/V of the step in `buffer`, and compute its logits [num_samples, vocab_size]."""
        input_ids, positions, slots, samples, cu_q, cu_k, lens, table = shape.views(buffer)
        metadata = AttentionMetadata(cu_q, lens, cu_k, *shape[-2:], table, slots, groups)  # max_seqlen_q, max_seqlen_k
        input_ids = torch.where(input_ids < 0, self._sampled.index_select(0, (-1 - input_ids).clamp_(min=0)), input_ids)
        hidden_states = self.model(input_ids, positions, self.kv_caches, metadata)
        return self.model.lm_head(hidden_states.index_select(0, samples.narrow(0, 0, shape.num_samples)))

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: K/V of every share is written, and the shares that reached their end sample."""
        return self.launch(output)()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step; what is returned waits for its end. The device runs steps one after the other, as they come."""
        fresh, scheduled = self._update_rows(output), output.scheduled
        if not scheduled:
            return partial(ModelRunnerOutput, [], [])
        graphs = self.graphs if all(len(share.token_ids) == 1 for share in scheduled) else None
        packed, shape, rows, positions, groups = self._pack(scheduled, graphs.size_for(len(scheduled)) if graphs else 0)
        self._sample_index[rows] = np.arange(len(rows))
        compute = partial(self._compute, packed, shape, self._asked[rows], positions, groups, fresh, graphs)
        if self._worker:
            return partial(_result, scheduled, self._worker.submit(compute).result)
        done = compute()
        return partial(_result, scheduled, lambda: done)

    def reset(self) -> None:
        """Forget the rows. A CPU's worker is waited for; a GPU ends what it does before whatever it is given next."""
        if self._worker:
            self._worker.submit(int).result()
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(len(self._asked)))

    @torch.inference_mode()
    def _compute(self, packed: Tensor, shape: StepShape, asked: np.ndarray, positions: np.ndarray, groups: tuple,
                 fresh: list[int], graphs: DecodeGraphs | None) -> tuple[list[Tensor], Any]:
        """Give the device its work: the step's sampled ids and logprobs in host memory once the event has come."""
        if fresh and self.backend.attend is attend_torch:  # it reads blocks to their end: masked, but 0 * NaN is NaN
            for cache in self.kv_caches:
                cache[:, fresh] = 0
        if graphs:
            logits = graphs.replay(packed, shape.num_rows)
        else:
            logits = self._forward(groups, packed.to(self.device, non_blocking=True), shape)
        # Ids beyond the tokenizer's are rows of padding: no token they name can be read.
        logits = logits[: len(asked), : self.vocab_size]
        sampled = sample(logits, asked, positions, self.generator)
        self._sampled[: len(asked)] = known = sampled.clamp(min=0)
        num_logprobs = int(asked["logprobs"].max(initial=-1))
        results = [sampled, *(gather_logprobs(logits, known, num_logprobs) if num_logprobs >= 0 else ())]
        results = [tensor.to("cpu", non_blocking=True) for tensor in results]
        return results, torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None

    def _update_rows(self, output: SchedulerOutput) -> list[int]:
        """Keep a row per running request. Returns the blocks beyond the computed tokens: they may hold garbage."""
        fresh: list[int] = []
        gone = output.preempted_req_ids | output.finished_req_ids
        self._free_rows += [self._rows.pop(request_id) for request_id in gone if request_id in self._rows]
        for share in output.scheduled:
            # The blocks of computed tokens are already in its row, if it has one.
            row, begin = self._rows.get(share.request_id), cdiv(share.num_computed_tokens, self.block_size)
            fresh += share.block_ids[begin:]
            if row is None:
                self._rows[share.request_id] = row = self._free_rows.pop()
                self._asked[row], begin = sampling_row(share.sampling_params), 0
            if begin < len(share.block_ids):
                self._table[row, begin : len(share.block_ids)] = share.block_ids[begin:]
        return fresh

    def _pack(self, scheduled: list[ScheduledRequest], graph_size: int) -> tuple:
        """A step's integers in host memory, as the graph of that size has them or, if it is 0, as long as they are.
        Returns them, their StepShape, row of the table and position of each token to sample, and attend_torch's groups.
        A share that reaches its end samples one token, and one for each draft. Padding attends to the dummy block."""
        ids, token_ids, starts, _, drafts, is_last, _ = zip(*scheduled, strict=True) if scheduled else [()] * 7
        lens, start, samples, rows = (np.full(graph_size or len(scheduled), pad) for pad in (1, 0, 0, -1))
        lens[: len(scheduled)], start[: len(scheduled)] = [*map(len, token_ids)], starts
        samples[: len(scheduled)] = (np.array(drafts, np.int64) + 1) * np.array(is_last, np.int64)
        rows[: len(scheduled)] = [self._rows[request_id] for request_id in ids]
        ends, context = lens.cumsum(), start + lens
        max_k, num_samples = int(context.max()), int(samples.sum())
        shape = StepShape(int(ends[-1]), len(lens), num_samples, cdiv(max_k, self.block_size), int(lens.max()), max_k)
        if graph_size:
            shape = StepShape(graph_size, graph_size, graph_size, self._table.shape[1], 1, self.max_model_len)
        # PyTorch hands pinned memory out anew only when the copies from it are done.
        packed = torch.zeros(shape.num_integers, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        input_ids, positions, slots, sample_rows, *cu, context_lens, table = (v.numpy() for v in shape.views(packed))
        flat_ids = list(chain.from_iterable(token_ids))
        input_ids[: len(flat_ids)] = flat_ids
        unknown = np.flatnonzero(input_ids < 0)
        input_ids[unknown] = -1 - self._sample_index[rows.repeat(lens)[unknown]]
        positions[:] = np.arange(len(positions)) + np.repeat(context - ends, lens)
        sample_rows[:num_samples] = np.arange(num_samples) + np.repeat(ends - samples.cumsum(), samples)
        cu[0][1:], cu[1][1:], context_lens[:] = ends, context.cumsum(), context
        table[:] = self._table[rows, : shape.max_blocks]
        blocks = table[np.repeat(np.arange(len(lens)), lens), positions // self.block_size]
        slots[:] = blocks * np.int64(self.block_size) + positions % self.block_size
        groups: tuple = ()
        if self.backend.attend is attend_torch:
            groups = group_rows(cu[0], context, table, self.block_size, self.dtype, self.device)
        return packed, shape, rows.repeat(samples), positions[sample_rows[:num_samples]] + 1, groups


def _result(scheduled: list[ScheduledRequest], wait: Callable[[], tuple]) -> ModelRunnerOutput:
    """Each share's tokens: the drafts that agree with what was sampled in their place, and one sampled token more."""
    tensors, event = wait()
    if event:
        event.synchronize()
    token_ids, *logprobs = [tensor.tolist() for tensor in tensors]
    output, end = ModelRunnerOutput([], [[] for _ in scheduled]), 0
    for i, share in enumerate(scheduled):
        begin, end = end, end + (share.num_spec_tokens + 1 if share.is_last_chunk else 0)
        sampled = token_ids[begin:end]
        if share.num_spec_tokens:
            pairs = zip(share.token_ids[-share.num_spec_tokens :], sampled, strict=False)
            sampled = sampled[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) + 1]
        output.sampled_token_ids.append(sampled)
        if logprobs and (wanted := share.sampling_params.logprobs) is not None:
            rows = zip(*(each[begin : begin + len(sampled)] for each in logprobs), strict=True)
            output.logprobs[i] = [(ids[: wanted + 1], values[: wanted + 1], rank) for ids, values, rank in rows]
    return output


def _choose_device_and_dtype(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    with blame(f"device={config.device!r}, but PyTorch {torch.__version__} does not have it"):
        device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
            torch.cuda.empty_cache()  # what an engine before this one left
    auto = "float32" if device.type == "cpu" else str(config.hf_config.dtype or "float32").removeprefix("torch.")
    return device, getattr(torch, auto if config.dtype == "auto" else config.dtype)
