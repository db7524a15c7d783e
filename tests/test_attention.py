"""The paged attention call against dense attention over contiguous keys, for any mix of rows."""

import sys
import types

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

from nanoserve import attention
from nanoserve.attention import AttentionMetadata, attend_torch, group_rows, select_backend, store_kv

CPU = torch.device("cpu")
MIXES = {  # (queries, context) of each row
    "decodes": [(1, 1), (1, 5), (1, 33), (1, 64), (1, 17)],
    "prompts": [(7, 7), (1, 1), (20, 20)],
    "chunks": [(5, 12), (8, 8), (3, 40)],
    "mixed": [(1, 9), (16, 50), (1, 1), (4, 4), (3, 30), (1, 31), (3, 29)],
    "idle row": [(2, 9), (0, 12), (1, 5)],  # a row without a query
    "decode, one row": [(1, 23)],
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
        row_groups=group_rows(cu_q, lens_k, table, block_size, torch.float32, CPU),
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
    groups = group_rows(np.arange(257), lens, table, 16, torch.float32, CPU)
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
        ("flash_attn_3", "cpu", torch.bfloat16, 64, None, "CUDA"),
        ("torch_varlen", "cpu", torch.bfloat16, 64, 256, "CUDA"),
        ("flash_attn", "cuda", torch.float32, 64, None, "float32"),
        ("torch_varlen", "cuda", torch.float32, 64, None, "float32"),
        ("flash_attn", "cuda", torch.bfloat16, 257, None, "257"),
        ("flash_attn_3", "cuda", torch.bfloat16, 36, None, "36"),
        ("flash", "cpu", torch.float32, 64, None, "'flash'"),
    ],
)
def test_a_backend_that_cannot_run_says_why(name, device, dtype, head_dim, block_size, reason):
    with pytest.raises(ValueError, match=reason):
        select_backend(name, block_size, torch.device(device), dtype, head_dim)


class Gpu:
    """What select_backend asks of a machine: the modules that can be imported, and the GPU's compute capability."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        for name in ("flash_attn", "flash_attn_interface"):
            monkeypatch.setitem(sys.modules, name, None)  # import raises ImportError

    def install(self, *names):
        for name in names:
            module = types.ModuleType(name)
            module.flash_attn_with_kvcache = lambda q, page_table=None, block_table=None: None
            self.patch.setitem(sys.modules, name, module)

    def capability(self, major, minor=0):
        self.patch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


BF16 = (torch.device("cuda"), torch.bfloat16, 64)


@pytest.mark.parametrize(
    "installed,major,block_size,expected",
    [
        ((), 8, None, ("torch_varlen", 256)),
        ((), 9, None, ("torch_varlen", 256)),
        ((), 7, None, ("torch", 16)),  # Turing has no FlashAttention
        (("flash_attn",), 8, None, ("flash_attn", 256)),
        (("flash_attn",), 12, 512, ("flash_attn", 256)),
        (("flash_attn", "flash_attn_interface"), 9, None, ("flash_attn_3", 128)),
        (("flash_attn", "flash_attn_interface"), 9, 16, ("flash_attn_3", 128)),
        (("flash_attn", "flash_attn_interface"), 8, None, ("flash_attn", 256)),  # FlashAttention 3 is for Hopper
        (("flash_attn", "flash_attn_interface"), 10, None, ("flash_attn", 256)),
        (("flash_attn_interface",), 8, 256, ("torch_varlen", 256)),
        (("flash_attn",), 8, 16, ("torch", 16)),  # a page size that only plain PyTorch can have
    ],
)
def test_auto_takes_the_best_backend_that_imports_and_fits(gpu, installed, major, block_size, expected):
    gpu.install(*installed)
    gpu.capability(major)
    backend = select_backend("auto", block_size, *BF16)
    assert (backend.name, backend.block_size) == expected


def test_auto_never_takes_a_kernel_for_a_dtype_or_head_size_it_does_not_have(gpu):
    gpu.install("flash_attn", "flash_attn_interface")
    gpu.capability(9)
    cuda = torch.device("cuda")
    for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 264), (torch.float16, 60)):
        assert select_backend("auto", None, cuda, dtype, head_dim).name == "torch"
    assert select_backend("auto", None, cuda, torch.float16, 256).name == "flash_attn_3"


@pytest.mark.parametrize(
    "name,installed,major,block_size,reason",
    [
        ("flash_attn_3", (), 9, None, "tokenspeed-fa3"),
        ("flash_attn", (), 9, None, "pip install --no-build-isolation"),
        ("flash_attn_3", ("flash_attn_interface",), 8, None, "compute capability must be .*8.0"),
        ("flash_attn", ("flash_attn",), 7, None, "compute capability must be .*7.0"),
        ("torch_varlen", (), 7, None, "compute capability must be .*7.0"),
        ("flash_attn", ("flash_attn",), 9, 128, "block_size must be a multiple of 256, got 128"),
        ("torch_varlen", (), 9, 16, "block_size must be a multiple of 256, got 16"),
    ],
)
def test_a_named_backend_that_cannot_run_says_what_is_missing(gpu, name, installed, major, block_size, reason):
    gpu.install(*installed)
    gpu.capability(major)
    with pytest.raises(ValueError, match=f"attention_backend='{name}' cannot run: .*{reason}"):
        select_backend(name, block_size, *BF16)


def test_a_version_without_pages_is_no_backend(gpu, monkeypatch):
    """torch 2.11's varlen_attn takes no block_table, and flash-attn's builds of the wrong CUDA fail in many ways."""
    gpu.capability(8)
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: None)
    assert select_backend("auto", None, *BF16).name == "torch"
    with pytest.raises(ValueError, match="varlen_attn must be able to take block_table, pip install 'torch>=2.12'"):
        select_backend("torch_varlen", None, *BF16)

    def broken(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(attention, "import_module", broken)
    with pytest.raises(ValueError, match="undefined symbol"):
        select_backend("flash_attn", None, *BF16)
