"""Thousands of requests in one process: nothing grows, nothing gets slower. NANOSERVE_LONG_RUN=20000 makes it more."""

import gc
import os
import random
import statistics
import sys
import time
from collections import deque

import pytest
from helpers_scheduler import check_scheduler
from tiny_models import SIZES, save_model
from transformers import LlamaConfig

from nanoserve import LLM, SamplingParams

NUM_REQUESTS = int(os.environ.get("NANOSERVE_LONG_RUN", 8_000))
CHUNK = NUM_REQUESTS // 100
# oneDNN keeps code for each number of rows that it has multiplied, 0.3 to 1 MB each: with a budget of 64 tokens a step
# there are 64, which are seen before anything is measured.
BUDGET = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-layer")
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    save_model(LlamaConfig(**{**sizes, "num_key_value_heads": 1}), folder)
    return str(folder)


def containers(llm) -> dict[str, int]:
    """The length of everything that an engine's parts hold, two levels deep."""
    parts = {"llm": llm, "scheduler": llm.scheduler, "blocks": llm.block_manager, "runner": llm.runner}
    parts |= {"drafter": llm.drafter} if llm.drafter else {}
    kinds, lengths = (list, dict, set, deque), {}
    for part, owner in parts.items():
        for name, value in vars(owner).items():
            if isinstance(value, kinds):
                lengths[f"{part}.{name}"] = len(value)
                inner = value.values() if isinstance(value, dict) else value
                lengths[f"{part}.{name}.*"] = sum(len(each) for each in inner if isinstance(each, kinds))
    return lengths


def resident() -> float:
    """Memory of this process in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def requests(rng, number: int) -> tuple[list, list]:
    """Prompts of 4 to 12 tokens, some with a common start; 1 to 4 tokens of output, some sampled, some with more."""
    prompts = [[rng.randrange(2, 64) for _ in range(rng.randrange(4, 13))] for _ in range(number)]
    prompts = [[7, 7, 7, 7, *prompt[4:]] if rng.random() < 0.2 else prompt for prompt in prompts]
    kinds = (dict(temperature=0), dict(seed=3), dict(top_k=5, logprobs=1), dict(temperature=0, stop=["never"]))
    params = [SamplingParams(max_tokens=n, ignore_eos=True, **kinds[n % 4]) for n in range(1, 5)]
    return prompts, [rng.choice(params) for _ in prompts]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"drafts": True}], ids=["sync", "async", "drafts"])
def test_nothing_grows_and_nothing_gets_slower(folder, options):
    number = NUM_REQUESTS if not options else NUM_REQUESTS // 5
    if options.pop("drafts", False):
        options["speculative_config"] = dict(num_speculative_tokens=2, prompt_lookup_min=1, prompt_lookup_max=2)
    options |= dict(block_size=4, num_gpu_blocks_override=600, max_model_len=32, max_num_batched_tokens=BUDGET)
    llm = LLM(folder, max_num_seqs=256, **options)
    for n in range(1, BUDGET + 1):
        llm.generate([[n]] * n, SamplingParams(max_tokens=1), use_tqdm=False)
    rng, rates, memory, counted = random.Random(0), [], [], {}
    for i in range(number // CHUNK):
        prompts, params = requests(rng, CHUNK)
        begin = time.process_time()
        if i % 10 == 3:  # some leave early: a stream that is closed, a request that is aborted
            stream = llm.generate_stream(prompts, params)
            next(stream), stream.close()
            llm.add_request("aborted", prompts[0], params[0])
            llm.step(), llm.abort_request("aborted")
            outputs = []
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]
            rates.append(CHUNK / (time.process_time() - begin))
        del outputs
        llm.step()
        assert llm.block_manager.num_free_blocks == 600 and not llm.has_unfinished_requests()
        if i * CHUNK >= number / 5 and not counted:
            counted = containers(llm)
        if i * CHUNK >= number / 5:
            gc.collect()
            memory.append(resident())
    check_scheduler(llm.scheduler)
    # The prefix cache has at most a name for each block, and no more: by now there are as many as there ever will be.
    grown = {name: (counted[name], now) for name, now in containers(llm).items() if now > counted[name]}
    assert all(name.startswith("blocks._cached") and now <= 600 for name, (_, now) in grown.items()), grown
    assert memory[-1] - memory[0] < 5, f"MB at 20 % {memory[0]:.1f}, at the end {memory[-1]:.1f}"
    tenth = len(rates) // 10
    early, late = statistics.median(rates[tenth : 2 * tenth]), statistics.median(rates[-tenth:])
    print(f"{number} requests, {early:.0f} then {late:.0f} requests per second of CPU, {memory[0]:.1f} MB then "
          f"{memory[-1]:.1f}")  # fmt: skip
    if number == NUM_REQUESTS:  # of processor time: the machine is shared, and caches are warm in the second tenth
        assert late > 0.8 * early, f"requests per second of processor time: {early:.0f}, at the end {late:.0f}"
