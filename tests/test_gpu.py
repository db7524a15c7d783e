"""What only a GPU can decide: the kernels themselves, capture and replay, real memory. `python -m pytest -m gpu`.

Most are twins of tests that run anywhere (test_attention, test_cuda_contracts, test_cuda_graph, test_model_runner,
test_parity). Matrix products on a GPU round differently for different batch sizes, so two runs of half precision may
part where two tokens are about equally likely, and nowhere else.
"""

import random
from pathlib import Path

import pytest
import torch
from helpers_scheduler import check_scheduler
from test_attention import MIXES, make_case
from test_cuda_graph import decode_step, execute_eagerly
from test_parity import PROMPTS, reference
from tiny_models import make_model_of_nothing, make_tokenizer
from transformers import Qwen3Config

from nanoserve import LLM, SamplingParams, model
from nanoserve.attention import BACKENDS, AttentionMetadata, attend_torch, store_kv
from nanoserve.config import EngineConfig
from nanoserve.loader import load_config
from nanoserve.model_runner import ModelRunner

DEVICE = "cuda"
TIE = 0.1  # logprobs closer than this are one to half precision
KERNELS = {backend.name: backend for backend in BACKENDS if backend.module}
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)
HEADS = {
    "Qwen3-0.6B": (16, 8, 128),
    "Qwen2.5-0.5B": (14, 2, 64),
    "one head each": (4, 4, 64),
    "Llama-3.2-1B": (32, 8, 64),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.cuda.is_available() is False"),
]


@pytest.fixture(params=KERNELS)
def kernel(request):
    """Each backend that this machine can run; the reason why not, for the others."""
    try:
        KERNELS[request.param].check(torch.device(DEVICE), torch.float16, 64, None)
    except ValueError as error:
        pytest.skip(f"{request.param}: {error}")
    return KERNELS[request.param]


def on_device(metadata):
    moved = [value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in metadata]
    return AttentionMetadata(*moved)._replace(row_groups=())


def generate(llm, prompts, params=GREEDY):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def assert_same_or_tied(outputs, expected_ids):
    """Equal tokens, up to the first place where the expected one was about as likely as the one that was taken."""
    for output, expected in zip(outputs, expected_ids, strict=True):
        for i, (token, wanted) in enumerate(zip(output.token_ids, expected, strict=True)):
            if token != wanted:
                likely = output.logprobs[i]
                assert wanted in likely and likely[token].logprob - likely[wanted].logprob < TIE
                break


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mix", MIXES)
def test_a_kernel_computes_what_plain_pytorch_does(kernel, mix, heads, dtype):
    num_heads, num_kv_heads, head_dim = HEADS[heads]
    rows = [(queries, context * 20) for queries, context in MIXES[mix]]
    sizes = {kernel.block_size, 16 if kernel.page_multiple == 1 else 512}
    for block_size in sizes:
        q, cache, metadata, (k, v), _ = make_case(rows, block_size, num_heads, num_kv_heads, head_dim)
        q, cache, k, v = (tensor.to(dtype) for tensor in (q, cache, k, v))
        store_kv(k, v, cache, metadata.slot_mapping)
        groups = [group._replace(bias=group.bias.float()) for group in metadata.row_groups]
        expected = attend_torch(q.float(), cache.float(), metadata._replace(row_groups=tuple(groups)))
        out = kernel.attend(q.to(DEVICE), cache.to(DEVICE), on_device(metadata))
        assert out.shape == q.shape and out.dtype == dtype
        assert (out.cpu().float() - expected).abs().max() < (0.03 if dtype == torch.bfloat16 else 0.005)


def test_a_rows_attention_does_not_depend_on_the_other_rows(kernel):
    """Bit for bit, decoding alone or among others, whatever their number and their lengths: contexts are not split."""
    rows = [(1, 3000), (1, 40), *[(1, 1 + 97 * i) for i in range(30)]]
    q, cache, metadata, (k, v), _ = make_case(rows, kernel.block_size, 16, 8, 128)
    q, cache, k, v = (tensor.half().to(DEVICE) for tensor in (q, cache, k, v))
    metadata = on_device(metadata)
    store_kv(k, v, cache, metadata.slot_mapping)
    together = kernel.attend(q, cache, metadata)
    for row in range(len(rows)):
        one = torch.arange(2, dtype=torch.int32, device=DEVICE)
        lens = metadata.context_lens[row : row + 1]
        alone = metadata._replace(
            cu_seqlens_q=one,
            context_lens=lens,
            cu_seqlens_k=one * lens,
            max_seqlen_k=rows[row][1],
            block_table=metadata.block_table[row : row + 1].contiguous(),
        )
        assert torch.equal(kernel.attend(q[row : row + 1], cache, alone)[0], together[row])


def test_float32_on_cuda_generates_what_transformers_does(tiny_model):
    """Through plain PyTorch's attention, which is what "auto" takes for float32: the same tokens, all of them."""
    folder, hf_model = tiny_model
    llm = LLM(folder, device=DEVICE, dtype="float32", num_gpu_blocks_override=64)
    assert llm.runner.backend.name == "torch"
    expected = [reference(hf_model, prompt, 48) for prompt in PROMPTS]
    assert_same_or_tied(generate(llm, PROMPTS), expected)


@pytest.mark.parametrize("budget", [512, 24])
def test_half_precision_generates_what_transformers_does(kernel, budget, tiny_model):
    """With graphs, compiled functions and chunks, against float32 on the CPU."""
    folder, hf_model = tiny_model
    llm = LLM(folder, device=DEVICE, dtype="float16", attention_backend=kernel.name, max_num_batched_tokens=budget)
    assert llm.runner.graphs is not None
    assert_same_or_tied(generate(llm, PROMPTS), [reference(hf_model, prompt, 48) for prompt in PROMPTS])
    check_scheduler(llm.scheduler)


@pytest.fixture(scope="module")
def runners(llama):
    """One runner a kernel, with graphs of up to 40 requests."""
    made = {}

    def get(name):
        if name not in made:
            options = dict(device=DEVICE, dtype="float16", attention_backend=name, max_num_seqs=40, max_model_len=48)
            config = EngineConfig(model=llama[0], num_gpu_blocks_override=80, **options)
            made[name] = ModelRunner(config.for_model(load_config(Path(llama[0])), 288), Path(llama[0]))
        return made[name]

    return get


def test_a_replayed_step_is_the_step_for_every_batch_size(kernel, runners):
    """Logits, and K/V in every block but the one for padding."""
    runner, rng = runners(kernel.name), random.Random(0)
    for step, num_rows in enumerate(rng.sample(range(1, 41), 40)):
        output = decode_step(runner, num_rows, rng, step)
        expected, after = execute_eagerly(runner, output)
        runner.execute(output)
        logits = runner.graphs.logits[: runner.graphs.size_for(num_rows)]
        assert not logits.isnan().any()
        assert (logits[:num_rows] - expected).abs().max() < 0.05
        for cache, wanted in zip(runner.kv_caches, after, strict=True):
            assert (cache[:, : runner.num_blocks] - wanted[:, : runner.num_blocks]).abs().max() < 0.05


def test_tokens_are_the_same_with_graphs_and_without_and_in_any_batch(kernel, llama):
    options = dict(device=DEVICE, dtype="float16", attention_backend=kernel.name, max_num_seqs=20)
    llm = LLM(llama[0], **options)
    prompts = [[(5 * i + j) % 200 for j in range(2 + 3 * i)] for i in range(20)]
    together = generate(llm, prompts)
    expected = [output.token_ids for output in together]
    assert [output.token_ids for output in generate(llm, prompts)] == expected  # the same batches, bit for bit
    assert_same_or_tied([generate(llm, [prompt])[0] for prompt in prompts], expected)
    llm.runner.graphs = None
    assert_same_or_tied(generate(llm, prompts), expected)
    assert_same_or_tied(generate(LLM(llama[0], enforce_eager=True, **options), prompts), expected)
    random.Random(0).shuffle(prompts)
    by_prompt = {str(prompt): ids for prompt, ids in zip(sorted(prompts, key=len), expected, strict=True)}
    assert_same_or_tied(generate(llm, prompts), [by_prompt[str(prompt)] for prompt in prompts])


def test_a_step_waits_for_the_device_once(kernel, llama, monkeypatch):
    """CUDA's own word for it: every synchronizing call raises, but for the one that brings the sampled ids back."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = dict(device=DEVICE, dtype="float16", attention_backend=kernel.name, max_num_batched_tokens=48)
    llm = LLM(llama[0], **options)
    generate(llm, PROMPTS, params)  # pinned memory is allocated the first time
    real, calls = torch.Tensor.tolist, []

    def tolist(tensor):
        if not tensor.is_cuda:
            return real(tensor)
        calls.append(len(tensor))
        torch.cuda.set_sync_debug_mode("default")
        try:
            return real(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    try:
        torch.cuda.set_sync_debug_mode("error")
        outputs = generate(llm, PROMPTS, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(output.token_ids) for output in outputs] == [12] * len(PROMPTS)
    assert len(calls) <= llm.last_output.step + 1 and max(calls) == len(PROMPTS)


def test_nothing_is_compiled_after_the_warm_up(kernel, tiny_model, monkeypatch):
    import torch._dynamo

    llm = LLM(tiny_model[0], device=DEVICE, dtype="float16", attention_backend=kernel.name, max_num_batched_tokens=100)
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    rng = random.Random(0)
    for num_prompts in (1, 2, 3, 5, 17, 40):
        prompts = [[rng.randrange(200) for _ in range(rng.randint(1, 90))] for _ in range(num_prompts)]
        generate(llm, prompts, SamplingParams(temperature=0.7, max_tokens=5))


@pytest.mark.parametrize("num_tokens", [1, 2, 11, 300])
def test_compiled_functions_compute_what_eager_ones_do(num_tokens):
    causal_lm = make_model_of_nothing()
    causal_lm.compile_ops()
    compiled, eager = causal_lm.ops, model
    make = torch.Generator(DEVICE).manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=make, device=DEVICE, dtype=torch.bfloat16)

    x, residual, weight = noise(num_tokens, 256), noise(num_tokens, 256), noise(256)
    q, cos, sin = noise(num_tokens, 8, 64), noise(num_tokens, 1, 32), noise(num_tokens, 1, 32)

    def run(ops, name, args):
        """The result, as a tuple, and the number of kernels that it took."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result = getattr(ops, name)(*args)
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return result if isinstance(result, tuple) else (result,), len(events)

    with torch.inference_mode():
        for name, args in (
            ("add_rms_norm", (x, residual, weight, 1e-6)),
            ("norm_and_rotate", (q, weight[:64], 1e-6, cos, sin)),
            ("norm_and_rotate", (q, None, 1e-6, cos, sin)),
            ("silu_and_mul", (x,)),
        ):
            run(compiled, name, args)  # compiles
            (result, num_kernels), (wanted, num_eager) = run(compiled, name, args), run(eager, name, args)
            assert num_kernels <= max(1, num_eager // 2)
            for tensor, each in zip(result, wanted, strict=True):
                torch.testing.assert_close(tensor, each, atol=0.05, rtol=0.05)


@pytest.fixture(scope="module")
def qwen_shape(tmp_path_factory):
    """A folder with the config of Qwen3-0.6B, a small tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("qwen3-0.6b")
    sizes = dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128)
    sizes |= dict(num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=40960)
    Qwen3Config(**sizes, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_memory_stays_within_its_share_of_the_card(kernel, share, qwen_shape):
    """Weights, activations of the largest steps and K/V do; the graphs come on top."""
    options = dict(device=DEVICE, dtype="bfloat16", load_format="dummy", attention_backend=kernel.name)
    llm = LLM(qwen_shape, max_num_seqs=64, max_num_batched_tokens=4096, gpu_memory_utilization=share, **options)
    total = torch.cuda.get_device_properties(0).total_memory
    held = sum(cache.numel() * cache.element_size() for cache in llm.runner.kv_caches)
    assert held == (llm.runner.num_blocks + 1) * llm.runner.block_bytes
    torch.cuda.reset_peak_memory_stats()
    rng = random.Random(0)
    prompts = [[rng.randrange(280) for _ in range(400)] for _ in range(80)]
    outputs = generate(llm, prompts, SamplingParams(temperature=1.0, top_p=0.9, max_tokens=8, ignore_eos=True))
    assert all(len(output.token_ids) == 8 for output in outputs)
    assert 0.7 * share * total < torch.cuda.max_memory_allocated() <= share * total
    assert torch.cuda.max_memory_reserved() <= share * total + (1 << 30)


def test_a_card_without_room_says_so(llama):
    with pytest.raises(ValueError, match="gpu_memory_utilization=1e-06"):
        LLM(llama[0], device=DEVICE, dtype="float16", gpu_memory_utilization=1e-6)
    with pytest.raises(ValueError, match="lower num_gpu_blocks_override"):
        LLM(llama[0], device=DEVICE, dtype="float16", num_gpu_blocks_override=2**40)
