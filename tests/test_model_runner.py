"""A step's integers, the moves between host and device, and how much memory the K/V cache gets."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_cuda_contracts import stand_ins  # noqa: F401
from test_cuda_graph import fake_graphs  # noqa: F401

from nanoserve import LLM, SamplingParams, model_runner
from nanoserve.block_manager import cdiv
from nanoserve.config import EngineConfig
from nanoserve.cuda_graph import StepShape
from nanoserve.loader import load_config
from nanoserve.model_runner import GiB, ModelRunner
from nanoserve.sampler import sampling_row
from nanoserve.scheduler import ScheduledRequest, SchedulerOutput

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make_config(folder, **options):
    config = EngineConfig(model=folder, **{"max_model_len": 64, "num_gpu_blocks_override": 40, **options})
    return config.for_model(load_config(Path(folder)), 288)


def make_runner(folder, **options):
    return ModelRunner(make_config(folder, **options), Path(folder))


def random_step(rng, num_rows, block_size, num_blocks=400):
    """Prompts, chunks, decodes, drafts and unfinished prompts, in random blocks."""
    free, shares = rng.sample(range(num_blocks), num_blocks), []
    for row in range(num_rows):
        start, length = rng.choice([0, rng.randrange(40)]), rng.choice([1, 1, rng.randint(1, 20)])
        drafts = rng.randrange(min(length, 4))
        tokens = [rng.randrange(288) for _ in range(length)]
        blocks = [free.pop() for _ in range(cdiv(start + length, block_size) + rng.randrange(2))]
        is_last = drafts > 0 or rng.random() < 0.7
        shares.append(ScheduledRequest(f"{row}", tokens, start, blocks, drafts, is_last, GREEDY))
    return shares


@pytest.mark.parametrize("seed", range(20))
def test_a_steps_integers_are_what_they_say(seed, llama):
    """Against the definition of each, row by row and token by token, in one buffer of 32-bit integers."""
    rng, block_size = random.Random(seed), random.Random(seed).choice([1, 4, 16])
    runner = make_runner(llama[0], max_num_seqs=12, block_size=block_size, num_gpu_blocks_override=1)
    shares = random_step(rng, rng.randint(1, 12), block_size)
    runner._update_rows(SchedulerOutput(shares, set(), set(), 0, 0))
    counts = [share.num_spec_tokens + 1 if share.is_last_chunk else 0 for share in shares]
    packed, shape, rows, positions_to_sample, _ = runner._pack(shares, 0)
    input_ids, positions, slots, samples, cu_q, cu_k, lens, table = shape.views(packed)
    assert packed.dtype == torch.int32 and len(packed) == shape.num_integers
    views = shape.views(packed)
    assert all(view.untyped_storage().data_ptr() == packed.data_ptr() for view in views)
    assert all(view.data_ptr() % view.element_size() == 0 and view.is_contiguous() for view in views)
    assert [view.dtype for view in views] == [torch.int64] * 4 + [torch.int32] * 4

    tokens = [
        (token, share.num_computed_tokens + i, share) for share in shares for i, token in enumerate(share.token_ids)
    ]
    assert input_ids.tolist() == [token for token, _, _ in tokens]
    assert positions.tolist() == [position for _, position, _ in tokens]
    assert slots.tolist() == [s.block_ids[p // block_size] * block_size + p % block_size for _, p, s in tokens]
    ends = np.cumsum([len(share.token_ids) for share in shares]).tolist()
    contexts = [share.num_computed_tokens + len(share.token_ids) for share in shares]
    assert cu_q.tolist() == [0, *ends] and lens.tolist() == contexts
    assert cu_k.tolist() == [0, *np.cumsum(contexts).tolist()]
    for row, share in enumerate(shares):
        needed = cdiv(contexts[row], block_size)
        assert table[row, :needed].tolist() == share.block_ids[:needed]
    assert shape.max_blocks == max(cdiv(context, block_size) for context in contexts)
    assert shape.max_seqlen_q == max(len(share.token_ids) for share in shares)
    assert shape.max_seqlen_k == max(contexts) and all(type(number) is int for number in shape)
    wanted = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
    assert samples[: shape.num_samples].tolist() == wanted
    assert positions_to_sample.tolist() == [tokens[row][1] + 1 for row in wanted]
    assert rows.tolist() == [runner._rows[tokens[row][2].request_id] for row in wanted]


def test_rows_keep_their_block_tables_and_only_append(llama):
    runner = make_runner(llama[0], max_num_seqs=3, block_size=4)

    def step(finished=(), **blocks):
        shares = [ScheduledRequest(name, [1], 0, ids, 0, True, GREEDY) for name, ids in blocks.items()]
        runner._update_rows(SchedulerOutput(shares, set(), set(finished), 0, 0))
        return {name: runner._table[runner._rows[name], : len(ids)].tolist() == ids for name, ids in blocks.items()}

    assert step(a=[1, 2], b=[3], c=[4, 5, 6]) == dict(a=True, b=True, c=True)
    assert step(a=[1, 2, 7], c=[4, 5, 6]) == dict(a=True, c=True)
    assert step(finished="a", d=[8], b=[3, 9]) == dict(d=True, b=True)  # in the row that was a's
    assert step(finished="bcd", a=[9, 8, 7]) == dict(a=True)
    assert len(runner._free_rows) == 2 and list(runner._rows) == ["a"]


WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
MOVES = ("to", "copy_")


def count_moves(monkeypatch, function):
    """Calls that wait for the device, and copies to it, while `function` runs; a copy that waits is refused."""
    calls, packing = dict.fromkeys((*WAITS, *MOVES), 0), []

    def counted(name, real):
        def method(self, *args, **kwargs):
            is_cast = name == "to" and isinstance(args[0], torch.dtype)
            if not is_cast and not packing:
                assert name not in MOVES or kwargs.get("non_blocking"), f"a {name} that the host waits for"
                calls[name] += 1
            return real(self, *args, **kwargs)

        return method

    def pack(self, *args, real=ModelRunner._pack):  # what is done to host memory counts for nothing
        packing.append(True)
        try:
            return real(self, *args)
        finally:
            packing.pop()

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_pack", pack)
        for name in calls:
            patch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
        function()
    return {name: count for name, count in calls.items() if count}


@pytest.mark.parametrize("graph", [False, True])
def test_a_step_brings_one_tensor_there_and_one_back(graph, fake_graphs, monkeypatch, llama):  # noqa: F811
    """Mixed or decode-only, replayed or not: one copy of all integers, one of the sampled ids, and no other wait."""
    runner = make_runner(llama[0], attention_backend="flash_attn_3", block_size=4, max_num_seqs=8)
    logits = torch.zeros(8, 288)  # of a model that is a stub here, since stand-ins for kernels read values
    monkeypatch.setattr(runner, "_forward", lambda groups, buffer, shape: logits[: shape.num_samples])
    if graph:
        runner.capture_graphs(8)
    decodes = [ScheduledRequest(str(i), [i], 5 + i, [i, i + 8, i + 16], 0, True, GREEDY) for i in range(4)]
    chunk = ScheduledRequest("c", [1, 2, 3], 0, [30], 0, False, GREEDY)
    for shares in (decodes, [*decodes, chunk], [chunk]):
        output = SchedulerOutput(shares, set(), set(), 0, 0)
        calls = count_moves(monkeypatch, lambda output=output: runner.execute(output))
        expected = Counter(["copy_", "copy_"] if graph and chunk not in shares else ["to"])  # there, and of logits
        assert calls == expected + Counter(["to", "tolist"])  # empty, if nobody samples


def test_on_cuda_the_host_reads_results_when_their_event_has_come(monkeypatch, llama):
    """The event is recorded behind the copies, and waited for before anything is read."""
    runner, order = make_runner(llama[0]), []

    class Tensors(list):
        def __iter__(self):
            order.append("read")
            return super().__iter__()

    event = SimpleNamespace(synchronize=lambda: order.append("wait"))
    stream = SimpleNamespace(record_event=lambda: order.append("record") or event)
    graphs = SimpleNamespace(replay=lambda packed, size: torch.eye(size, 288))  # logits without a device
    real_sample = model_runner.sample
    monkeypatch.setattr(model_runner, "sample", lambda *args: order.append("sample") or real_sample(*args))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    runner.device = torch.device("cuda")
    runner._asked[:2] = [sampling_row(GREEDY)] * 2
    shape = StepShape(2, 2, 2, 1, 1, 64)
    results, recorded = runner._compute(None, shape, runner._asked[:2], np.array([3, 4]), (), [], graphs)
    assert recorded is event and order == ["sample", "record"]
    shares = [ScheduledRequest(str(i), [i], 3 + i, [i], 0, True, GREEDY) for i in range(2)]
    output = model_runner._result(shares, lambda: (Tensors(results), event))
    assert output.sampled_token_ids == [[0], [1]] and order == ["sample", "record", "wait", "read"]


def test_the_step_of_the_model_itself_waits_for_nothing(monkeypatch, llama):
    """With plain PyTorch's attention, whose plan is made before; its tensors go to the device with the step."""
    runner = make_runner(llama[0], block_size=4, max_num_seqs=8)
    shares = random_step(random.Random(1), 5, 4, num_blocks=40)
    runner._update_rows(SchedulerOutput(shares, set(), set(), 0, 0))
    with torch.inference_mode():
        packed, shape, *_, groups = runner._pack(shares, 0)
        assert count_moves(monkeypatch, lambda: runner._forward(groups, packed, shape)) == {}


def test_host_memory_is_pinned_for_cuda_and_only_there(monkeypatch, llama):
    runner, real, pinned = make_runner(llama[0]), torch.zeros, []

    def zeros(*args, pin_memory=False, **kwargs):
        pinned.append(pin_memory)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", zeros)
    runner.backend = type("Backend", (), {"attend": None})()
    for device in ("cpu", "cuda"):
        runner.device = torch.device(device)
        runner._pack([], 4)
    assert pinned == [False, True]


class FakeCard:
    """torch.cuda's answers about memory, in GiB; `ours` is what this process's tensors were given at the most."""

    def __init__(self, monkeypatch, total, ours, others):
        numbers = (int((total - ours - others) * GiB), int(total * GiB))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: numbers)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(ours * GiB))


def fit_blocks(llama, block_mib=16, **options):
    """Blocks that fit on the card, of block_mib MiB for all layers together."""
    runner = ModelRunner.__new__(ModelRunner)
    runner.device, runner.block_size, runner.max_model_len = torch.device("cuda"), 256, 4096
    runner.block_bytes = block_mib << 20
    return runner._fit_blocks(make_config(llama[0], num_gpu_blocks_override=None, **options))


@pytest.mark.parametrize(
    "total,ours,others,share",
    [
        (24, 4, 0.5, 0.9),  # the card's share, less weights and activations
        (24, 4, 2.0, 0.9),
        (80, 20, 0.5, 0.5),
        (24, 4, 3.0, 0.9),  # others leave less than that share: nearly all of what is free
        (24, 4, 12, 0.9),
    ],
)
def test_the_cache_gets_the_cards_share_less_what_this_process_uses(
    total, ours, others, share, monkeypatch, llama, capsys
):
    FakeCard(monkeypatch, total, ours, others)
    num_blocks = fit_blocks(llama, gpu_memory_utilization=share)
    free = total - ours - others
    assert num_blocks == int(min(total * share - ours, free * 0.95) * 64) - 1  # one for padding
    assert (num_blocks + 1) / 64 <= min(total * share - ours, free)
    line = capsys.readouterr().err
    assert f"{total:.2f} GiB" in line and f"{ours:.2f}" in line and f"processes {others:.2f}" in line


def test_memory_of_other_processes_is_not_taken_for_ours(monkeypatch, llama):
    FakeCard(monkeypatch, 24, 4, 0.5)
    alone = fit_blocks(llama)
    FakeCard(monkeypatch, 24, 4, 1.2)
    assert fit_blocks(llama) == alone


@pytest.mark.parametrize("total,ours,others", [(8, 7.5, 0.3), (8, 3, 4.9), (2, 2, 0)])
def test_an_impossible_size_says_the_numbers_and_what_would_help(total, ours, others, monkeypatch, llama):
    FakeCard(monkeypatch, total, ours, others)
    with pytest.raises(ValueError) as error:
        fit_blocks(llama)
    text = str(error.value)
    for part in (
        "max_model_len=4096",
        "needs 0.25 GiB",
    ):
        assert part in text
    for option in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization=0.9"):
        assert option in text
    assert "-" not in text.split("there is room for")[1].split(":")[0]


def test_no_more_blocks_than_all_requests_together_can_use(monkeypatch, llama):
    FakeCard(monkeypatch, 80, 2, 1)
    assert fit_blocks(llama, max_num_seqs=4) == 4 * 16


def test_the_number_of_blocks_that_was_asked_for_wins_and_one_more_is_for_padding(llama):
    runner = make_runner(llama[0], num_gpu_blocks_override=7, block_size=4)
    assert runner.num_blocks == 7
    assert all(cache.shape[1] == 8 and not cache.any() for cache in runner.kv_caches)
    assert (runner._table[-1] == 7).all()


def test_caches_that_find_no_memory_say_what_would_help(llama):
    with pytest.raises(ValueError, match="no room for .* K/V blocks, lower num_gpu_blocks_override"):
        make_runner(llama[0], num_gpu_blocks_override=2**50)


def test_cuda_without_a_gpu_is_refused(monkeypatch, llama):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda', but PyTorch .* does not have it"):
        make_runner(llama[0], device="cuda")


@pytest.mark.parametrize("max_num_seqs,budget", [(8, 100), (4, 512), (20, 10), (1, 5)])
def test_the_warm_up_runs_the_largest_step_and_leaves_nothing(max_num_seqs, budget, monkeypatch, llama):
    """All tokens, all rows, logits and sampling for each; then small steps for what is compiled; in the dummy block."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    options = dict(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=4)
    config = make_config(llama[0], **options)
    runner = ModelRunner(config, Path(llama[0]))
    runner._table[-1] = 0
    shapes, sampled, real, real_sample = [], [], runner._forward, model_runner.sample

    def forward(groups, buffer, shape):
        shapes.append(shape)
        assert (shape.views(buffer)[2] < 4).all() and len(runner.kv_caches[0][0]) == 1  # the one block there is
        return real(groups, buffer, shape)

    def sample(logits, asked, *args):
        sampled.append(len(logits))
        assert (asked["temperature"] > 0).all() and (asked["top_p"] < 1).all()  # the path with the most memory
        return real_sample(logits, asked, *args)

    monkeypatch.setattr(model_runner, "sample", sample)
    runner._forward = forward
    runner._warm_up(config)
    largest = min(budget, max_num_seqs * 64)
    assert [shape.num_tokens for shape in shapes] == [largest, min(largest, 11), 1]
    assert shapes[0].num_rows == shapes[0].num_samples == sampled[0] == min(max_num_seqs, budget)
    assert not runner._rows and len(runner._free_rows) == max_num_seqs
    assert not any(cache.isnan().any() for cache in runner.kv_caches)


def test_the_seed_decides_the_tokens_whatever_ran_before(llama):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    options = dict(num_gpu_blocks_override=40, block_size=16)
    first, second, other = (
        LLM(llama[0], seed=seed, **options).generate([1, 2], params, use_tqdm=False)[0].outputs[0].token_ids
        for seed in (7, 7, 8)
    )
    assert first == second != other


def test_a_shape_knows_the_length_of_its_buffer():
    for shape in (StepShape(1, 1, 1, 1, 1, 1), StepShape(7, 3, 2, 5, 4, 60), StepShape(256, 256, 256, 160, 1, 40960)):
        views = shape.views(torch.zeros(shape.num_integers + 5, dtype=torch.int32))
        assert sum(view.numel() * view.element_size() for view in views) == 4 * shape.num_integers
