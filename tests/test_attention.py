"""The paged attention call against dense attention over contiguous keys, for any mix of rows."""

import numpy as np
import pytest
import torch

from nanoserve import attention
from nanoserve.attention import AttentionMetadata, attend_torch, group_rows, select_backend, store_kv

CPU = torch.device("cpu")
MIXES = {  # (queries, context) of each row
    "decodes": [(1, 1), (1, 5), (1, 33), (1, 64), (1, 17)],
    "prompts": [(7, 7), (1, 1), (20, 20)],
    "chunks": [(5, 12), (8, 8), (3, 40)],
    "mixed": [(1, 9), (16, 50), (1, 1), (4, 4), (3, 30), (1, 31), (3, 29)],
}


def make_case(rows, block_size, num_heads=6, num_kv_heads=2, head_dim=8, seed=0):
    """q, cache, metadata and, for each row, its dense keys and values; unused slots hold noise."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-context // block_size) for _, context in rows) + 3
    cache = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, generator=generator) * 50
    order = iter(torch.randperm(num_blocks, generator=generator).tolist())
    table = np.zeros((len(rows), max(-(-context // block_size) for _, context in rows)), dtype=np.int32)
    dense, slots, new_k, new_v = [], [], [], []
    for row, (queries, context) in enumerate(rows):
        blocks = [next(order) for _ in range(-(-context // block_size))]
        table[row, : len(blocks)] = blocks
        k, v = torch.randn(2, context, num_kv_heads, head_dim, generator=generator)
        places = [blocks[i // block_size] * block_size + i % block_size for i in range(context)]
        old = context - queries
        store_kv(k[:old], v[:old], cache, torch.tensor(places[:old], dtype=torch.int64))
        slots += places[old:]
        new_k.append(k[old:])
        new_v.append(v[old:])
        dense.append((k, v))
    lens_q, lens_k = np.array(rows).T
    cu_q, cu_k = (np.concatenate(([0], np.cumsum(lens))) for lens in (lens_q, lens_k))
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor(cu_q, dtype=torch.int32),
        context_lens=torch.tensor(lens_k, dtype=torch.int32),
        cu_seqlens_k=torch.tensor(cu_k, dtype=torch.int32),
        max_seqlen_q=int(lens_q.max()),
        max_seqlen_k=int(lens_k.max()),
        block_table=torch.from_numpy(table),
        slot_mapping=torch.tensor(slots),
        row_groups=group_rows(cu_q, lens_k, table, block_size, num_heads // num_kv_heads, torch.float32, CPU),
    )
    q = torch.randn(int(cu_q[-1]), num_heads, head_dim, generator=generator)
    return q, cache, metadata, (torch.cat(new_k), torch.cat(new_v)), dense


def dense_attention(q, rows, dense):
    """Attention written out: the last query of a row sees the whole context, the one before it one key less."""
    out, begin = [], 0
    for (queries, context), (k, v) in zip(rows, dense, strict=True):
        for i in range(queries):
            seen = context - queries + i + 1
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                scores = k[:seen, kv_head] @ q[begin + i, head] / q.shape[2] ** 0.5
                out.append(scores.softmax(0) @ v[:seen, kv_head])
        begin += queries
    return torch.stack(out).view_as(q)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_paged_attention_equals_dense_attention(mix, block_size, monkeypatch):
    monkeypatch.setattr(attention, "MAX_PIECE", 6)  # so that long rows are cut into pieces here too
    rows = MIXES[mix]
    q, cache, metadata, (k, v), dense = make_case(rows, block_size)
    store_kv(k, v, cache, metadata.slot_mapping)
    assert (attend_torch(q, cache, metadata) - dense_attention(q, rows, dense)).abs().max() < 1e-5


def test_store_kv_touches_only_its_slots():
    q, cache, metadata, (k, v), _ = make_case(MIXES["mixed"], 4)
    before = cache.clone()
    store_kv(k, v, cache, metadata.slot_mapping)
    others = torch.ones(cache.shape[1] * cache.shape[2], dtype=torch.bool)
    others[metadata.slot_mapping] = False
    assert torch.equal(cache.flatten(1, 2)[:, others], before.flatten(1, 2)[:, others])
    assert torch.equal(cache[0].flatten(0, 1)[metadata.slot_mapping], k)
    assert torch.equal(cache[1].flatten(0, 1)[metadata.slot_mapping], v)


def test_many_decode_rows_make_few_groups():
    lens = np.arange(1, 257)
    table = np.zeros((256, 16), dtype=np.int32)
    groups = group_rows(np.arange(257), lens, table, 16, 1, torch.float32, CPU)
    assert len(groups) <= 5
    assert sorted(torch.cat([group.tokens for group in groups]).tolist()) == list(range(256))
    padded = sum(group.bias.numel() for group in groups)
    assert padded < 2 * (lens + 16).sum()  # what is gathered is linear in what is attended


def test_auto_takes_plain_pytorch_on_a_cpu_with_any_block_size():
    for block_size in (None, 1, 7, 16):
        assert select_backend("auto", block_size, CPU, torch.float32, 64).name == "torch"


@pytest.mark.parametrize(
    "name,device,dtype,head_dim,block_size,reason",
    [
        ("flash_attn", "cpu", torch.bfloat16, 64, None, "CUDA"),
        ("flash_attn", "cuda", torch.float32, 64, None, "float32"),
        ("flash_attn", "cuda", torch.bfloat16, 257, None, "257"),
        ("flash_attn", "cuda", torch.bfloat16, 64, None, "pip install"),
        ("flash", "cpu", torch.float32, 64, None, "'flash'"),
    ],
)
def test_a_backend_that_cannot_run_says_why(name, device, dtype, head_dim, block_size, reason):
    with pytest.raises(ValueError, match=reason):
        select_backend(name, block_size, torch.device(device), dtype, head_dim)


def test_flash_attn_is_called_by_its_contract(monkeypatch):
    """A stand-in for flash-attn 2.8.3 checks what its documentation asks for and computes the same in plain PyTorch."""
    rows, block_size = MIXES["mixed"], 256
    q, cache, metadata, (k, v), dense = make_case(rows, block_size)
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, block_table=None
    ):
        calls.append(q.shape)
        assert q.dtype == k.dtype == v.dtype and q.is_contiguous() and k.stride(-1) == v.stride(-1) == 1
        assert k.shape == v.shape and k.shape[1] % 256 == 0 and q.shape[1] % k.shape[2] == 0
        for index in (cu_seqlens_q, cu_seqlens_k, block_table):
            assert index.dtype == torch.int32 and index.stride(-1) == 1
        num_rows = len(cu_seqlens_q) - 1
        assert len(cu_seqlens_k) == num_rows + 1 and block_table.shape[0] == num_rows and max_seqlen_q > 0
        assert type(max_seqlen_q) is int and type(max_seqlen_k) is int and causal
        lens_q, lens_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert max(lens_q) <= max_seqlen_q and max(lens_k) <= max_seqlen_k
        context = []
        for row, length in enumerate(lens_k):
            blocks = block_table[row, : -(-length // k.shape[1])].long()
            context.append((k[blocks].flatten(0, 1)[:length], v[blocks].flatten(0, 1)[:length]))
        return dense_attention(q, list(zip(lens_q, lens_k, strict=True)), context)

    module = type("flash_attn", (), {"flash_attn_varlen_func": staticmethod(flash_attn_varlen_func)})
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", module)
    store_kv(k, v, cache, metadata.slot_mapping)
    out = attention.attend_flash_attn(q, cache, metadata)
    assert calls and (out - dense_attention(q, rows, dense)).abs().max() < 1e-5
    bf16 = (torch.device("cuda"), torch.bfloat16, 64)
    assert select_backend("auto", None, *bf16).block_size == 256
    assert select_backend("auto", 16, *bf16).name == "torch"  # a page size FlashAttention 2 cannot have
    with pytest.raises(ValueError, match="multiple of 256"):
        select_backend("flash_attn", 16, *bf16)
