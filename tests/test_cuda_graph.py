"""CUDA graphs without CUDA: a fake graph runs its function again, over the same buffers, whenever it is replayed.

So sizes, padding, stale buffers and the table's width are what they would be on a GPU. That the kernels can be
captured, and do the same when replayed, tests/test_gpu.py decides.
"""

import random
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers_scheduler import check_scheduler
from test_cuda_contracts import KERNELS, stand_ins  # noqa: F401

from nanoserve import LLM, SamplingParams, cuda_graph
from nanoserve.block_manager import cdiv
from nanoserve.config import EngineConfig
from nanoserve.cuda_graph import DecodeGraphs, graph_sizes
from nanoserve.loader import load_config
from nanoserve.model_runner import ModelRunner
from nanoserve.scheduler import ScheduledRequest, SchedulerOutput

MAX_MODEL_LEN = 48
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class FakeGraph:
    """As torch.cuda.CUDAGraph, for a function that reads and writes the same buffers each time."""

    made: list["FakeGraph"] = []

    def __init__(self, run, pool):
        self.run, self.given_pool, self.num_replays = run, pool, 0
        FakeGraph.made.append(self)
        run()

    def pool(self):
        return self.given_pool or "the first graph's pool"

    def replay(self):
        self.num_replays += 1
        self.run()


@pytest.fixture
def fake_graphs(stand_ins, monkeypatch):  # noqa: F811
    stand_ins.dtypes = (torch.float32,)
    FakeGraph.made = []
    monkeypatch.setattr(cuda_graph, "capture", FakeGraph)
    return FakeGraph.made


def make_runner(folder, max_num_seqs, backend="flash_attn_3", block_size=4):
    options = dict(attention_backend=backend, block_size=block_size, max_num_seqs=max_num_seqs)
    num_blocks = max_num_seqs * cdiv(MAX_MODEL_LEN, block_size)
    config = EngineConfig(model=folder, num_gpu_blocks_override=num_blocks, max_model_len=MAX_MODEL_LEN, **options)
    runner = ModelRunner(config.for_model(load_config(Path(folder)), 288), Path(folder))
    runner.capture_graphs(max_num_seqs)
    return runner


def decode_step(runner, num_rows, rng, step=0):
    """One token for each of num_rows requests, of random contexts, one the longest possible, in random blocks."""
    free = rng.sample(range(runner.num_blocks), runner.num_blocks)
    shares = []
    for row in range(num_rows):
        position = MAX_MODEL_LEN - 1 if row == 0 else rng.randrange(MAX_MODEL_LEN)
        blocks = [free.pop() for _ in range(position // runner.block_size + 1)]
        shares.append(ScheduledRequest(f"{step}-{row}", [rng.randrange(288)], position, blocks, 0, True, GREEDY))
    rng.shuffle(shares)
    return SchedulerOutput(shares, set(runner._rows), set(), 0, step)


def execute_eagerly(runner, output):
    """The step's logits without a graph, and the caches after it; the caches are then as they were before."""
    before = [cache.clone() for cache in runner.kv_caches]
    runner._update_rows(output)
    with torch.inference_mode():
        packed, shape, *_, groups = runner._pack(output.scheduled, 0)
        logits = runner._forward(groups, packed.to(runner.device), shape).clone()
    after = [cache.clone() for cache in runner.kv_caches]
    for cache, old in zip(runner.kv_caches, before, strict=True):
        cache.copy_(old)
    return logits, after


@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 7, 8, 12, 16, 20, 33, 100, 256, 500])
def test_there_is_a_size_for_every_batch(max_batch_size):
    sizes = graph_sizes(max_batch_size)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_batch_size
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs.sizes = sizes
    for num_rows in range(1, max_batch_size + 1):
        size = graphs.size_for(num_rows)
        assert size >= num_rows and size in sizes
        assert size - num_rows < 16 and size <= 2 * num_rows  # little of it is padding


@pytest.mark.parametrize("max_num_seqs", [1, 2, 12, 20, 48])
def test_a_replayed_step_is_the_step_for_every_batch_size(max_num_seqs, fake_graphs, llama):
    """Sizes come in random order, so whatever a larger batch left in the buffers is there for a smaller one."""
    rng = random.Random(max_num_seqs)
    runner = make_runner(llama[0], max_num_seqs)
    dummy, captured = runner.num_blocks, len(fake_graphs)
    for cache in runner.kv_caches:
        cache.normal_()
    for step, num_rows in enumerate(rng.sample(range(1, max_num_seqs + 1), max_num_seqs)):
        output = decode_step(runner, num_rows, rng, step)
        for cache in runner.kv_caches:
            cache[:, dummy] = float("nan")  # a row of padding that reads what it has not written shows it
        expected, after = execute_eagerly(runner, output)
        result = runner.execute(output)
        size = runner.graphs.size_for(num_rows)
        logits = runner.graphs.logits[:size]
        assert (logits[:num_rows] - expected).abs().max() < 1e-4
        assert result.sampled_token_ids == expected.argmax(-1, keepdim=True).tolist()
        assert not logits.isnan().any()
        for cache, wanted in zip(runner.kv_caches, after, strict=True):
            assert torch.allclose(cache[:, :dummy], wanted[:, :dummy], atol=1e-4)
            assert cache[:, dummy, 1:].isnan().all()  # padding writes one slot, in a block that is nobody's
    assert len(fake_graphs) == captured and sum(graph.num_replays for graph in fake_graphs) == max_num_seqs


@pytest.mark.parametrize("name,block_size", [("flash_attn", 256), ("torch_varlen", 256), ("flash_attn_3", 16)])
def test_a_replayed_step_keeps_each_kernels_contract(name, block_size, fake_graphs, llama):
    runner = make_runner(llama[0], 12, name, block_size)
    rng = random.Random(0)
    for step, num_rows in enumerate((12, 5, 1, 9)):
        output = decode_step(runner, num_rows, rng, step)
        expected, _ = execute_eagerly(runner, output)
        runner.execute(output)
        assert (runner.graphs.logits[:num_rows] - expected).abs().max() < 1e-4


def test_graphs_are_captured_largest_first_in_one_pool(fake_graphs, llama, capsys):
    runner = make_runner(llama[0], 20)
    shapes = [graph.run.args[-1] for graph in fake_graphs]
    assert [shape.num_rows for shape in shapes] == [20, 16, 8, 4, 2, 1]
    assert fake_graphs[0].given_pool is None
    assert all(graph.given_pool == fake_graphs[0].pool() for graph in fake_graphs[1:])
    assert runner.graphs.logits.shape == (20, 288)
    assert "capturing CUDA graphs" in capsys.readouterr().err


def test_only_steps_of_one_token_a_row_are_replayed(fake_graphs, llama):
    runner = make_runner(llama[0], 4)
    two_tokens = ScheduledRequest("a", [5, 6], 0, [3], 0, True, GREEDY)
    drafts = ScheduledRequest("b", [5, 6, 7], 1, [4], 2, True, GREEDY)
    one_token = ScheduledRequest("c", [5], 7, [1, 2], 0, True, GREEDY)
    unfinished = ScheduledRequest("d", [9], 2, [0], 0, False, GREEDY)  # a chunk of one token

    def replays(*shares):
        before = sum(graph.num_replays for graph in fake_graphs)
        output = SchedulerOutput(list(shares), set(), set(), 0, 0)
        expected = execute_eagerly(runner, output)[0].argmax(-1).tolist() if shares != (drafts,) else None
        result = runner.execute(output)
        if expected is not None:
            assert [token for tokens in result.sampled_token_ids for token in tokens] == expected
        assert [bool(tokens) for tokens in result.sampled_token_ids] == [share.is_last_chunk for share in shares]
        return sum(graph.num_replays for graph in fake_graphs) - before

    assert replays(two_tokens) == replays(two_tokens, one_token) == replays(drafts) == 0
    assert replays(one_token) == replays(one_token, unfinished) == replays(unfinished) == 1
    assert replays(unfinished, one_token) == 1


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=16)])
@pytest.mark.parametrize("max_num_seqs", [3, 12])
def test_tokens_are_the_same_with_graphs_and_without(max_num_seqs, params, fake_graphs, llama):
    """Chunks, decodes, prefix hits and preemptions: a batch that grows, shrinks and changes its order."""
    prompts = [[(5 * i + j) % 200 for j in range(2 + 3 * i)] for i in range(12)] + [list(range(20, 40))] * 2
    options = dict(max_num_seqs=max_num_seqs, max_num_batched_tokens=24, block_size=4, num_gpu_blocks_override=32)
    options |= dict(attention_backend="flash_attn_3", max_model_len=64)
    expected = LLM(llama[0], **options).generate(prompts, params, use_tqdm=False)
    llm = LLM(llama[0], **options)
    llm.runner.capture_graphs(max_num_seqs)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [o.outputs[0].token_ids for o in expected]
    assert sum(graph.num_replays for graph in fake_graphs) >= 10
    assert max_num_seqs == 3 or any(output.metrics.num_preemptions for output in outputs)
    check_scheduler(llm.scheduler)


def test_capture_runs_once_before_and_records_in_the_given_pool(monkeypatch):
    events = []

    @contextmanager
    def graph(made, pool=None):
        events.append(("begin", made, pool))
        yield
        events.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "a graph")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    assert cuda_graph.capture(lambda: events.append("run"), "a pool") == "a graph"
    assert events == ["run", "synchronize", ("begin", "a graph", "a pool"), "run", "end"]


def test_every_kernel_is_among_those_that_were_replayed():
    assert set(KERNELS) == {"flash_attn_3", "flash_attn", "torch_varlen"}
