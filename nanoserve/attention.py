"""PagedAttention's kernel call: K/V is stored into blocks, then every row attends to its own blocks.
A row is some queries at the end of a longer context, so one call serves any mix of prompt chunks, decodes and drafts.
This module decides how a backend is called; it does not know requests. A backend is (q, kv_cache, metadata) -> out, q
and out [num_tokens, num_heads, head_dim], kv_cache [2, num_blocks, block_size, num_kv_heads, head_dim], keys first."""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from inspect import signature
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanoserve.request import blame, require


class RowGroup(NamedTuple):
    """Rows, or pieces of rows, that have the same number of queries and contexts of similar length."""
    tokens: torch.Tensor | slice  # [rows * queries] int64, which rows of q; slice(None): all, in their order
    blocks: torch.Tensor  # [rows * blocks] int64, padded with the row's last block
    bias: torch.Tensor  # [rows, 1, queries, blocks * block_size], 0 where a query sees a key, else -inf


class AttentionMetadata(NamedTuple):
    """Where each row's queries and keys are; a row is one scheduled request."""
    cu_seqlens_q: torch.Tensor  # [num_rows + 1] int32, row r's queries are q[cu_seqlens_q[r] : cu_seqlens_q[r + 1]]
    context_lens: torch.Tensor  # [num_rows] int32, computed and scheduled tokens: the keys each row's last query sees
    cu_seqlens_k: torch.Tensor  # [num_rows + 1] int32, running sum of context_lens
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor  # [num_rows, max_blocks] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64, block * block_size + offset: where each token's K/V goes
    row_groups: tuple[RowGroup, ...] = ()  # for attend_torch alone


Attend = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write this step's keys and values, both [num_tokens, num_kv_heads, head_dim]: all of them before anything is
    attended to, so requests of one step can share each other's new blocks."""
    for new, cache in zip((k, v), kv_cache, strict=True):
        cache.flatten(0, 1).index_copy_(0, slot_mapping, new)


def attend_torch(q: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """Plain PyTorch, on any device and with any block size: gather a group's blocks, then one dense attention. Here the
    last of three tokens, in blocks 2 and 0 of a cache with two tokens to a block, sees three equal keys:
    >>> one_head = lambda *numbers: torch.tensor(numbers).view(-1, 1, 1)
    >>> cache, slots = torch.zeros(2, 3, 2, 1, 1), torch.tensor([4, 5, 0])
    >>> store_kv(one_head(0.0, 0.0, 0.0), one_head(1.0, 3.0, 8.0), cache, slots)
    >>> lens, table = np.array([3]), np.array([[2, 0]])
    >>> groups = group_rows(np.array([0, 1]), lens, table, 2, torch.float, torch.device("cpu"))
    >>> rows = map(torch.tensor, ([0, 1], lens, [0, 3]))
    >>> attend_torch(one_head(1.0), cache, AttentionMetadata(*rows, 1, 3, torch.tensor(table), slots, groups)).item()
    4.0
    """
    out = q.new_empty(q.shape)
    for group in metadata.row_groups:
        rows = len(group.bias)
        queries = q[group.tokens].view(rows, -1, *q.shape[1:])
        keys, values = (cache.index_select(0, group.blocks).view(rows, -1, *cache.shape[2:]) for cache in kv_cache)
        queries, keys, values = (each.transpose(1, 2) for each in (queries, keys, values))
        if queries.shape[2] == 1:  # the heads that share a key head are then more queries of it
            queries = queries.reshape(rows, keys.shape[1], -1, q.shape[2])
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.bias, enable_gqa=True)
        out[group.tokens] = attended.reshape(rows, q.shape[1], -1, q.shape[2]).transpose(1, 2).flatten(0, 1)
    return out


MAX_PIECE = 256  # queries of one row attended at once by attend_torch: bounds the bias, skips most of what is masked


def group_rows(cu_seqlens_q: np.ndarray, context_lens: np.ndarray, block_table: np.ndarray, block_size: int,
               dtype: torch.dtype, device: torch.device) -> tuple[RowGroup, ...]:
    """Plan attend_torch's work for a step: all rows with one query each land in a few groups, whatever their number.
    Groups go by number of queries and by the power of two that holds a row's blocks, so padding stays below half."""
    row = np.repeat(np.arange(len(context_lens)), np.diff(cu_seqlens_q))  # the row of each token
    token = np.arange(len(row))
    position = token + (context_lens - cu_seqlens_q[1:])[row]
    begin = np.flatnonzero((token - cu_seqlens_q[row]) % MAX_PIECE == 0)  # the first token of each piece of a row
    num_queries = np.diff(begin, append=len(row))
    num_blocks = position[begin + num_queries - 1] // block_size + 1
    group_key = num_queries * 64 + np.frexp(num_blocks - 1)[1]  # the bits of num_blocks - 1, fewer than 64
    keys = np.unique(group_key)
    groups = []
    for key in keys:
        members = np.flatnonzero(group_key == key)
        tokens = begin[members, None] + np.arange(int(num_queries[members[0]]))
        width = int(num_blocks[members].max())
        masked = torch.from_numpy(np.arange(width * block_size) > position[tokens][..., None])
        bias = torch.zeros(masked.shape, dtype=dtype).masked_fill_(masked, -torch.inf)[:, None]
        columns = np.minimum(np.arange(width), num_blocks[members, None] - 1)  # 0 times another's NaN would be NaN
        blocks = torch.from_numpy(block_table[row[begin[members], None], columns].astype(np.int64).ravel())
        index = torch.from_numpy(tokens.ravel()).to(device) if len(keys) > 1 else slice(None)
        groups.append(RowGroup(index, blocks.to(device), bias.to(device)))
    return tuple(groups)


def attend_flash_attn_3(q: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """FlashAttention 3, for Hopper (module flash_attn_interface): one call for any mix, pages of any size. Here and
    below, causal=True lines up the last query with the last key, so a chunk sees its whole past. num_splits=1 keeps a
    kernel from cutting contexts up by what else is in the batch: a row's result is its own."""
    from flash_attn_interface import flash_attn_with_kvcache

    rows = dict(cu_seqlens_q=metadata.cu_seqlens_q, cache_seqlens=metadata.context_lens,
                max_seqlen_q=metadata.max_seqlen_q)
    return flash_attn_with_kvcache(q, *kv_cache, page_table=metadata.block_table, **rows, causal=True, num_splits=1)


def attend_flash_attn(q: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """FlashAttention 2 (package flash-attn 2.8.3). Its call for mixed rows has no num_splits, so decodes take another;
    with a block table it reads only the differences of cu_seqlens_k, each row's whole context."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    if metadata.max_seqlen_q == 1:
        rows = dict(cache_seqlens=metadata.context_lens, block_table=metadata.block_table)
        return flash_attn_with_kvcache(q.unsqueeze(1), *kv_cache, **rows, causal=True, num_splits=1).squeeze(1)
    lens = (metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.max_seqlen_q, metadata.max_seqlen_k)
    return flash_attn_varlen_func(q, *kv_cache, *lens, causal=True, block_table=metadata.block_table)


def attend_torch_varlen(q: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """The FlashAttention kernels compiled into PyTorch >= 2.12: nothing to install. window_size (-1, 0) is its way to
    say causal. A lone query needs no mask, and then a key head is read once for all the query heads that share it."""
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    lens = (metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.max_seqlen_q, metadata.max_seqlen_k)
    pages = dict(seqused_k=metadata.context_lens, block_table=metadata.block_table, num_splits=1)
    window = (-1, 0) if metadata.max_seqlen_q > 1 else (-1, -1)
    return varlen_attn(q, *kv_cache, *lens, window_size=window, enable_gqa=True, **pages)


class AttentionBackend(NamedTuple):
    """A backend, its page sizes, and what its CUDA kernel needs; one without a `module` runs anywhere."""
    name: str
    attend: Attend
    block_size: int  # by default
    page_multiple: int  # block_size must be a multiple of it
    module: str | None = None
    function: str = ""  # of the module
    argument: str = ""  # that the function must be able to take
    architectures: range = range(0)  # major compute capabilities: Ampere is 8, Hopper 9, Blackwell 10 and 12
    install: str = ""

    def check(self, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None) -> None:
        """Raise ValueError unless it can run there."""
        multiple = self.page_multiple
        require(not (block_size or 0) % multiple, "block_size", f"a multiple of {multiple}", block_size)
        if self.module is None:
            return
        require(device.type == "cuda", "device", "a CUDA device", device.type)
        require(dtype in (torch.float16, torch.bfloat16), "dtype", "float16 or bfloat16", dtype)
        require(head_dim <= 256 and head_dim % 8 == 0, "head_dim", "a multiple of 8 up to 256", head_dim)
        with blame(f"cannot import {self.module}, {self.install}"):  # not there, or built for another torch or CUDA
            function = getattr(import_module(self.module), self.function)
        arguments = [*signature(function).parameters]
        require(self.argument in arguments, self.function, f"able to take {self.argument}, {self.install}", arguments)
        major, minor = torch.cuda.get_device_capability(device)
        require(major in self.architectures, "compute capability", "one its kernels are for", f"{major}.{minor}")


BACKENDS = (  # best first
    AttentionBackend("flash_attn_3", attend_flash_attn_3, 128, 1, "flash_attn_interface", "flash_attn_with_kvcache",
                     "page_table", range(9, 10), "build FlashAttention's folder hopper, or pip install tokenspeed-fa3"),
    AttentionBackend("flash_attn", attend_flash_attn, 256, 256, "flash_attn", "flash_attn_with_kvcache",
                     "block_table", range(8, 100), "pip install --no-build-isolation 'nanoserve[cuda]'"),
    AttentionBackend("torch_varlen", attend_torch_varlen, 256, 256, "torch.nn.attention.varlen", "varlen_attn",
                     "block_table", range(8, 100), "pip install 'torch>=2.12'"),
    AttentionBackend("torch", attend_torch, 16, 1),
)


def select_backend(name: str, block_size: int | None, device: torch.device, dtype: torch.dtype,
                   head_dim: int) -> AttentionBackend:
    """The named backend, or for "auto" the best that can run. Raises ValueError saying why one cannot."""
    for backend in [backend for backend in BACKENDS if name in ("auto", backend.name)]:
        with suppress(ValueError) if name == "auto" else blame(f"attention_backend={name!r} cannot run"):
            backend.check(device, dtype, head_dim, block_size)
            return backend
    raise ValueError(f"attention_backend must be auto, {', '.join(b.name for b in BACKENDS)}, got {name!r}")
