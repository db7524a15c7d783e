"""The CUDA kernels' contracts, kept on a machine that has no GPU.

Stand-ins for flash-attn 2.8.3, FlashAttention 3 and torch's varlen_attn have the real functions' arguments, check
whatever their documentation and source ask of a caller, and compute the same in plain PyTorch. So the real call sites
run, over every mix of rows. What a stand-in cannot know, tests/test_gpu.py asks the kernels themselves.
"""

import inspect
import sys
import types

import pytest
import torch
from helpers_scheduler import check_scheduler
from test_attention import MIXES, dense_attention, make_case
from tiny_models import CONFIGS, make_model_of_nothing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from nanoserve import LLM, SamplingParams, model
from nanoserve.attention import BACKENDS, AttentionBackend, store_kv
from nanoserve.cuda_graph import StepShape
from nanoserve.model_runner import ModelRunner

KERNELS = {backend.name: backend for backend in BACKENDS if backend.module}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class StandIns:
    """The three libraries' functions. `calls` counts them; `dtypes` is what the kernels are built for."""

    def __init__(self):
        self.calls = {name: 0 for name in ("varlen", "kvcache", "flash_attn_3", "torch_varlen")}
        self.dtypes = (torch.float16, torch.bfloat16)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        self.calls["varlen"] += 1
        assert causal and window_size == (-1, -1) and dropout_p == softcap == 0 and not return_attn_probs
        self.check(q, k, v, block_table, [cu_seqlens_q, cu_seqlens_k], page_multiple=256)
        lens_q, lens_k = self.lengths(cu_seqlens_q, max_seqlen_q), self.lengths(cu_seqlens_k, max_seqlen_k)
        if max_seqlen_q == 1:  # grouped heads are folded into queries then, and splits depend on the batch
            raise AssertionError("decode-only steps must not come here: this call has no num_splits")
        return self.attend(q, k, v, lens_q, lens_k, block_table, softmax_scale)

    def flash_attn_with_kvcache_2(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        self.calls["kvcache"] += 1
        assert causal and window_size == (-1, -1) and num_splits == 1 and not return_softmax_lse
        assert k is v is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is None and softcap == 0
        assert q.dim() == 4 and len(cache_seqlens) == len(q), "[rows, queries of each, heads, head_dim]"
        rows, length = q.shape[:2]
        self.check(q.flatten(0, 1), k_cache, v_cache, block_table, [], page_multiple=256)
        self.check_int32(cache_seqlens, (rows,))
        lens = cache_seqlens.tolist()
        out = self.attend(q.flatten(0, 1), k_cache, v_cache, [length] * rows, lens, block_table, softmax_scale)
        return out.view_as(q)

    def flash_attn_with_kvcache_3(
        self, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        self.calls["flash_attn_3"] += 1
        assert causal and window_size == (-1, -1) and num_splits == 1 and not return_softmax_lse
        assert k is v is qv is rotary_cos is cache_batch_idx is cache_leftpad is cu_seqlens_k_new is None
        self.check(q, k_cache, v_cache, page_table, [cu_seqlens_q], page_multiple=1)
        self.check_int32(cache_seqlens, (len(cu_seqlens_q) - 1,))
        lens_q = self.lengths(cu_seqlens_q, max_seqlen_q)
        return self.attend(q, k_cache, v_cache, lens_q, cache_seqlens.tolist(), page_table, softmax_scale)

    def varlen_attn(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
        window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        self.calls["torch_varlen"] += 1
        assert return_aux is None and num_splits == 1, "paged split-KV gives wrong rows (pytorch#194167)"
        assert enable_gqa or query.shape[1] == key.shape[2]
        self.check(query, key, value, block_table, [cu_seq_q, cu_seq_k], page_multiple=256)
        self.check_int32(seqused_k, (len(cu_seq_q) - 1,))
        lens_q, lens_k = self.lengths(cu_seq_q, max_q), self.lengths(cu_seq_k, max_k)
        assert lens_k == seqused_k.tolist()
        if window_size == (-1, -1):  # no mask at all, and heads folded into queries: right for lone queries only
            assert max_q == 1 and set(lens_q) == {1}
        else:
            assert window_size == (-1, 0)
        return self.attend(query, key, value, lens_q, lens_k, block_table, scale)

    def check(self, q, k, v, block_table, cumulative, page_multiple):
        assert q.dtype == k.dtype == v.dtype and q.dtype in self.dtypes
        assert q.dim() == 3 and k.dim() == 4 and k.shape == v.shape and len(q) > 0
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert q.shape[2] == k.shape[3] <= 256 and q.shape[2] % 8 == 0 and q.shape[1] % k.shape[2] == 0
        assert k.shape[1] % page_multiple == 0
        num_rows = len(block_table)
        assert num_rows > 0 and block_table.dim() == 2
        self.check_int32(block_table, tuple(block_table.shape))
        assert 0 <= int(block_table.min()) and int(block_table.max()) < len(k)
        for each in cumulative:
            self.check_int32(each, (num_rows + 1,))
            assert each[0] == 0 and (each.diff() >= 0).all()
        if cumulative:
            assert cumulative[0][-1] == len(q)

    def check_int32(self, tensor, shape):
        assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert tuple(tensor.shape) == shape

    def lengths(self, cumulative, upper_bound):
        lens = cumulative.diff().tolist()
        assert type(upper_bound) is int and 0 < max(lens) <= upper_bound
        return lens

    def attend(self, q, k, v, lens_q, lens_k, table, scale):
        """A row attends to its context through the table; the mask is aligned at the bottom right."""
        assert scale is None
        out, begin = torch.zeros_like(q), 0
        for row, (num_queries, context) in enumerate(zip(lens_q, lens_k, strict=True)):
            queries, begin = slice(begin, begin + num_queries), begin + num_queries
            if num_queries == 0 or context == 0:
                continue  # nothing is read, not even the table, and what is written is 0
            pages = table[row, : -(-context // k.shape[1])].long()
            keys, values = (cache[pages].flatten(0, 1)[:context].float().movedim(1, 0) for cache in (k, v))
            keys, values = (x.repeat_interleave(q.shape[1] // k.shape[2], 0) for x in (keys, values))
            scores = q[queries].float().movedim(1, 0) @ keys.mT / q.shape[2] ** 0.5
            seen = torch.ones(num_queries, context, dtype=torch.bool).tril(context - num_queries)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[queries] = (weights @ values).movedim(0, 1).to(q.dtype)
        return out


@pytest.fixture
def stand_ins(monkeypatch):
    """Every kernel is a stand-in, and every backend may run on this machine."""
    made = StandIns()
    flash_attn, hopper = types.ModuleType("flash_attn"), types.ModuleType("flash_attn_interface")
    flash_attn.flash_attn_varlen_func = made.flash_attn_varlen_func
    flash_attn.flash_attn_with_kvcache = made.flash_attn_with_kvcache_2
    hopper.flash_attn_with_kvcache = made.flash_attn_with_kvcache_3
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", hopper)
    monkeypatch.setattr(varlen, "varlen_attn", made.varlen_attn)
    monkeypatch.setattr(AttentionBackend, "check", lambda *args: None)
    return made


@pytest.mark.skipif("block_table" not in inspect.signature(varlen.varlen_attn).parameters, reason="torch < 2.12")
def test_the_stand_in_for_torch_has_torchs_own_arguments():
    def parameters(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(StandIns().varlen_attn) == parameters(varlen.varlen_attn)


@pytest.mark.parametrize("block_size", [256, 512])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_called_by_its_contract(name, mix, block_size, stand_ins):
    """In bfloat16, with keys across pages of any order, noise in every unused slot, and rows without a query."""
    rows = [(queries, context * 20) for queries, context in MIXES[mix]]
    q, cache, metadata, (k, v), dense = make_case(rows, block_size)
    q, cache, k, v = (tensor.bfloat16() for tensor in (q, cache, k, v))
    store_kv(k, v, cache, metadata.slot_mapping)
    metadata = metadata._replace(row_groups=())  # the kernels get no plan
    out = KERNELS[name].attend(q, cache, metadata)
    expected = dense_attention(q.float(), rows, [(k.bfloat16().float(), v.bfloat16().float()) for k, v in dense])
    assert out.shape == q.shape and out.dtype == q.dtype
    assert (out.float() - expected).abs().max() < 0.02  # half a step of bfloat16 at 4
    assert sum(stand_ins.calls.values()) == 1
    if name == "flash_attn":
        assert stand_ins.calls["kvcache"] == ("decode" in mix)


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_flash_attention_3_takes_pages_of_any_size(block_size, stand_ins):
    rows = MIXES["mixed"]
    q, cache, metadata, (k, v), dense = make_case(rows, block_size)
    q, cache, k, v = (tensor.half() for tensor in (q, cache, k, v))
    store_kv(k, v, cache, metadata.slot_mapping)
    out = KERNELS["flash_attn_3"].attend(q, cache, metadata)
    assert (out.float() - dense_attention(q.float(), rows, dense)).abs().max() < 0.01


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "broken",
    [
        dict(block_table=lambda t: t.long()),
        dict(block_table=lambda t: t.repeat_interleave(2, dim=1)[:, ::2]),
        dict(context_lens=lambda t: t.long(), cu_seqlens_k=lambda t: t.long()),
        dict(cu_seqlens_q=lambda t: t.long(), context_lens=lambda t: t.long()),
        dict(max_seqlen_q=lambda n: torch.tensor(n)),
        dict(max_seqlen_q=lambda n: n - 1),
    ],
    ids=lambda broken: " ".join(broken),
)
def test_the_stand_ins_refuse_what_the_kernels_refuse(name, broken, stand_ins):
    q, cache, metadata, _, _ = make_case([(3, 300), (2, 5)], 256)
    q, cache = q.bfloat16(), cache.bfloat16()
    KERNELS[name].attend(q, cache, metadata)
    wrong = {field: change(getattr(metadata, field)) for field, change in broken.items()}
    with pytest.raises(AssertionError):
        KERNELS[name].attend(q, cache, metadata._replace(**wrong))
    for wrong_q, wrong_cache in ((q.float(), cache.float()), (q, cache[:, :, :100])):
        if name != "flash_attn_3" or wrong_q is not q:  # which takes any page size
            with pytest.raises(AssertionError):
                KERNELS[name].attend(wrong_q, wrong_cache, metadata)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("budget", [512, 100])
def test_the_engine_generates_the_same_tokens_through_each_kernel(name, budget, stand_ins, llama):
    """Prompts of more than a page, in one chunk and in several beside decodes; some are preempted."""
    stand_ins.dtypes = (torch.float32,)
    prompts = [[(7 * i + j * j) % 250 for j in range(n)] for i, n in enumerate((255, 256, 250, 254, 300, 5, 257))]
    options = dict(max_num_batched_tokens=budget, block_size=256, num_gpu_blocks_override=5)
    expected = LLM(llama[0], attention_backend="torch", **options).generate(prompts, GREEDY, use_tqdm=False)
    llm = LLM(llama[0], attention_backend=name, **options)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert any(output.metrics.num_preemptions for output in outputs)
    used = {"flash_attn": ("varlen", "kvcache")}.get(name, (name,))
    assert all(count > 0 if call in used else count == 0 for call, count in stand_ins.calls.items())
    check_scheduler(llm.scheduler)


def empty_like_q(q, k, v, *args, **kwargs):
    """The kernels on tensors that are not there: they tell dtypes and devices all the same."""
    tensors = [x for x in [k, v, *args, *kwargs.values()] if isinstance(x, torch.Tensor)]
    assert all(x.device == q.device for x in tensors) and len(tensors) >= 4
    return torch.empty_like(q)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_step_runs_on_a_fake_cuda_device(name, architecture, graph, monkeypatch):
    """FakeTensorMode refuses what mixes devices or dtypes, or asks for a value. Here varlen_attn is torch's own."""
    flash_attn = types.SimpleNamespace(flash_attn_varlen_func=empty_like_q, flash_attn_with_kvcache=empty_like_q)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn)
    config = CONFIGS[architecture]()
    config.architectures = [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture] + "ForCausalLM"]
    backend, cuda = KERNELS[name], torch.device("cuda")
    head_dim = model.get_head_dim(config)
    shape = StepShape(8, 8, 8, 4, 1, 1024) if graph else StepShape(23, 5, 3, 2, 19, 400)
    runner = ModelRunner.__new__(ModelRunner)
    with torch.device("meta"):
        runner.model = model.CausalLM(config, backend.attend).to(torch.bfloat16)
    with FakeTensorMode(), torch.inference_mode():
        for module in runner.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = torch.empty(parameter.shape, dtype=parameter.dtype, device=cuda)
        if config.tie_word_embeddings:
            runner.model.lm_head.weight = runner.model.model.embed_tokens.weight
        runner.model.rope_table = torch.empty(1024, 2, head_dim, device=cuda)
        runner._sampled = torch.zeros(512, dtype=torch.int64, device=cuda)
        runner.kv_caches = [
            torch.zeros(2, 9, 256, 2, head_dim, dtype=torch.bfloat16, device=cuda)
            for _ in range(config.num_hidden_layers)
        ]
        buffer = torch.zeros(shape.num_integers, dtype=torch.int32, device=cuda)
        out = runner._forward((), buffer, shape)
        assert out.shape == (shape.num_samples, config.vocab_size)
        assert out.dtype == torch.bfloat16 and out.device.type == "cuda"
        assert out.argmax(dim=-1).dtype == torch.int64


def test_elementwise_functions_are_compiled_on_cuda_alone_and_not_after_the_warm_up(monkeypatch, llama):
    """One version for a single token and one for more, for any model, also where two sizes happen to be equal."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    real, counters = torch.compile, []

    def compile_here(function, **options):
        assert options == {"dynamic": True}
        counters.append(CompileCounter())  # compiles nothing, and counts how often it was asked to
        return real(function, backend=counters[-1], fullgraph=True, **options)

    def refuse(*args, **kwargs):
        raise AssertionError("torch.compile on a CPU")

    monkeypatch.setattr(torch, "compile", refuse)
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 64)  # this test makes many models in one process
    for hidden, heads, kv_heads, head_dim, norm in ((64, 4, 2, 16, None), (96, 8, 1, 24, True), (48, 8, 8, 16, True)):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", compile_here)
            causal_lm = make_model_of_nothing()
            causal_lm.compile_ops()
        ops, eager = causal_lm.ops, model
        weight = torch.nn.Parameter(torch.rand(hidden), requires_grad=False)
        head_weight = torch.rand(heads + kv_heads, head_dim) if norm else None
        embedding, table = torch.nn.Embedding(5, hidden), torch.rand(128, 2, head_dim)
        seen = []
        with torch.inference_mode():
            for num_tokens in (64, 11, 1, 2, 3, 4, 8, 9, 16, 24, 48, 63, 64, 65, 96, 1, 100):
                x = embedding(torch.arange(num_tokens) % 5)
                rope = table[torch.arange(num_tokens)].unsqueeze(1).unbind(2)
                qkv = torch.rand(num_tokens, (heads + 2 * kv_heads) * head_dim)
                calls = [("add_rms_norm", (x, torch.rand_like(x), weight, 1e-5)), ("silu_and_mul", (x,))]
                qk = qkv.view(num_tokens, -1, head_dim)[:, : heads + kv_heads]
                calls.append(("norm_and_rotate", (qk, head_weight, 1e-5, *rope)))
                for name, args in calls:
                    torch.testing.assert_close(getattr(ops, name)(*args), getattr(eager, name)(*args))
                seen.append(sum(counter.frame_count for counter in counters))
        assert seen[0] > 0 and len(set(seen[2:])) == 1, seen
    LLM(llama[0], num_gpu_blocks_override=8).generate([1, 2], GREEDY, use_tqdm=False)  # compiles nothing
