"""The engine against transformers: the same logits, the same greedy tokens, however the work is cut up."""

import pytest
import torch
from helpers_scheduler import check_scheduler
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams

PROMPTS = [[5, 6, 7, 8] * 3, list(range(10, 50)), [9], list(range(10, 30)) + [77, 78, 79]]  # two share a prefix
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def reference(model, prompt, max_tokens):
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return ids[0, len(prompt) :].tolist()


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("budget", [512, 7])
def test_logits_equal_transformers(tiny_model, budget):
    folder, model = tiny_model
    llm = LLM(folder, block_size=4, num_gpu_blocks_override=64, max_num_batched_tokens=budget)
    hidden = []
    llm.runner.model.register_forward_hook(lambda module, args, out: hidden.append(out.clone()))
    prompt = torch.randint(288, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert len(hidden) == -(-len(prompt) // budget)
    logits = llm.runner.model.lm_head(torch.cat(hidden))
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    assert expected.std() > 0.5  # a model that says nothing would agree with anything
    assert (logits - expected).abs().max() < 1e-4


def test_greedy_tokens_equal_transformers(tiny_model):
    folder, model = tiny_model
    llm = LLM(folder, block_size=16, num_gpu_blocks_override=64)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(outputs) == [reference(model, prompt, 64) for prompt in PROMPTS]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(PROMPTS)


@pytest.fixture(scope="module")
def expected(llama):
    return [reference(llama[1], prompt, 64) for prompt in PROMPTS]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("caching", [False, True])
def test_block_size_and_batching_do_not_change_tokens(llama, expected, block_size, caching):
    llm = LLM(llama[0], block_size=block_size, num_gpu_blocks_override=640 // block_size, enable_prefix_caching=caching)
    one_by_one = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    assert tokens(one_by_one) == expected
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(again) == expected
    assert (again[1].num_cached_tokens > 0) == caching  # the second time round its blocks are there
    assert (one_by_one[3].num_cached_tokens >= 16) == caching  # it begins like PROMPTS[1]
    check_scheduler(llm.scheduler)
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks


@pytest.mark.parametrize("budget,threshold", [(9, 0), (1, 0), (64, 5)])
def test_a_budget_smaller_than_a_prompt_does_not_change_tokens(llama, expected, budget, threshold):
    llm = LLM(
        llama[0],
        block_size=4,
        num_gpu_blocks_override=160,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
    )
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy,priority", [("fcfs", None), ("priority", [3, 2, 1, 0])])
def test_preemption_does_not_change_tokens(llama, expected, caching, policy, priority):
    llm = LLM(
        llama[0],
        block_size=4,
        num_gpu_blocks_override=36,
        max_model_len=112,
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
    )
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, priority=priority)
    assert tokens(outputs) == expected
    assert sum(output.metrics.num_preemptions for output in outputs) >= 3


@pytest.mark.demo
def test_the_demo_model_equals_transformers(demo_folder):
    llm = LLM(demo_folder, max_model_len=512)
    prompts = [
        "The three most important inventions of the 19th century were",
        "def fibonacci(n):\n    ",
        "Once upon a time, in a village of 12345 people,",
    ]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(demo_folder).eval()
    assert tokens(outputs) == [reference(model, output.prompt_token_ids, 48) for output in outputs]
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params, use_tqdm=False)
    assert "Paris" in answer[0].outputs[0].text
