"""Capture and replay of decode-only steps: the same kernels, started by one call instead of hundreds.
A graph fixes all but what lies in its buffers, so one is captured for each of some batch sizes; others are padded. This
module decides on the sizes and how a step's integers lie in one buffer. It does not know what a step computes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm


class StepShape(NamedTuple):
    """What a CUDA graph fixes of a step: all but the contents of its tensors."""
    num_tokens: int
    num_rows: int
    num_samples: int  # rows of logits
    max_blocks: int  # columns of the block table
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def num_integers(self) -> int:
        """The length of the int32 buffer that views() divides."""
        return 8 * self.num_tokens + self.num_rows * (3 + self.max_blocks) + 2  # an int64 is two of them

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The step's integers as views of one int32 buffer, so that one copy brings them all to the device. input_ids,
        positions, slot_mapping, sample_rows (its first num_samples count) [num_tokens] int64; cu_seqlens_q and
        cu_seqlens_k [num_rows + 1], context_lens [num_rows], block_table [num_rows, max_blocks] int32."""
        rows = self.num_rows
        sizes = (8 * self.num_tokens, rows + 1, rows + 1, rows, rows * self.max_blocks)
        wide, *lens, table = buffer.narrow(0, 0, self.num_integers).split(sizes)
        return *wide.view(torch.int64).view(4, -1).unbind(), *lens, table.view(rows, -1)


def graph_sizes(max_batch_size: int) -> list[int]:
    """The batch sizes to capture: enough for every batch up to max_batch_size, which is one of them.
    >>> graph_sizes(40)
    [1, 2, 4, 8, 16, 32, 40]
    """
    return sorted({min(size, max_batch_size) for size in (1, 2, 4, 8, *range(16, max_batch_size + 16, 16))})


def capture(run: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """The graph of what `run` does, with its memory in `pool`, another graph's, or None for a new one. `run` is called
    once before: what a kernel compiles, tunes or allocates the first time has no place in a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


class DecodeGraphs:
    """A graph for each size, over one input buffer, one output buffer and one pool of memory. `pack(size)` returns a
    step of padding, its integers and StepShape first; `run(buffer, shape)` computes one: logits [size, vocab_size]."""
    def __init__(self, sizes: list[int], pack: Callable[[int], tuple], run: Callable, logits: torch.Tensor):
        self.sizes, self.logits = sizes, logits
        self.buffer = pack(sizes[-1])[0].to(logits.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

        def compute(shape: StepShape) -> None:
            logits[: shape.num_rows].copy_(run(self.buffer, shape), non_blocking=True)

        pool = None
        for size in tqdm(sizes[::-1], desc="nanoserve: capturing CUDA graphs"):  # the largest makes room for all
            packed, shape, *_ = pack(size)
            self.buffer[: len(packed)].copy_(packed, non_blocking=True)
            self._graphs[size] = capture(partial(compute, shape), pool)
            pool = self._graphs[size].pool()

    def size_for(self, num_rows: int) -> int:  # what a batch is padded to
        return next(size for size in self.sizes if size >= num_rows)

    def replay(self, packed: torch.Tensor, size: int) -> torch.Tensor:
        """Logits [size, vocab_size] of a step of `size` rows, until the next replay."""
        self.buffer[: len(packed)].copy_(packed, non_blocking=True)
        self._graphs[size].replay()
        return self.logits[:size]
