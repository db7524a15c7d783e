"""Lesson: a step may be scheduled before the tokens of the one before it are known, and no output tells.

First without a model, on the device of tests/test_shadow_kv.py, which here ends a step only when the next one has been
scheduled. Then with tiny models, whose forward passes run on a worker thread: that is where order and races are real.
"""

import inspect
import random
import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import replace
from itertools import accumulate
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from helpers_scheduler import check_scheduler, make_request, names, shares
from test_cuda_contracts import stand_ins  # noqa: F401
from test_cuda_graph import fake_graphs  # noqa: F401
from test_shadow_kv import EOS, VOCABULARY, ShadowRun, ShadowRunner, generate_alone, prefix_numbers, run_cases
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import use_scheduler
from nanoserve import LLM, SamplingParams, model_runner
from nanoserve.async_scheduler import AsyncScheduler
from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.model_runner import ModelRunner
from nanoserve.request import Request, RequestStatus
from nanoserve.scheduler import Scheduler, StaticBatchScheduler

NUM_CASES = 1500
NUM_CHUNKS = 5
EVENTS = (
    "preemptions, withdrawn victims, prefix hits, aborts, failed steps, placeholders, chunks, dropped after an end, "
    "dropped after a preemption, stopped by EOS, stopped by id, stopped by text, stopped by length"
).split(", ")


class ShadowDevice(ShadowRunner):
    """Steps end in the order they were given in. A placeholder is what the step before sampled for that request."""

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self.sampled: dict[str, int] = {}

    def end(self, output, known: dict[str, list[int]]) -> list[list[int]]:
        """`known` holds each scheduled request's tokens before those that are scheduled."""
        prefixes = {}
        for share in output.scheduled:
            tokens = [self.sampled[share.request_id] if token_id == -1 else token_id for token_id in share.token_ids]
            prefixes[share.request_id] = prefix_numbers(known[share.request_id] + tokens)
        sampled = self.execute(output, prefixes)
        pairs = zip(output.scheduled, sampled, strict=True)
        self.sampled = {share.request_id: tokens[-1] for share, tokens in pairs if tokens}
        return sampled

    def fail(self, output, rng: random.Random) -> None:
        for share in output.scheduled:
            for position in range(share.num_computed_tokens, share.num_computed_tokens + len(share.token_ids)):
                if rng.random() < 0.5:
                    self.kv[self.slot(share, position)] = -1
        self.sampled = {}


class AsyncShadowRun(ShadowRun):
    """One random workload, driven as LLM does it: schedule a step, then end the one before it."""

    def __init__(self, seed: int, **fixed):
        super().__init__(seed, **{"num_spec_tokens": 0, **fixed})
        sync = self.scheduler
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "policy", "long_prefill_token_threshold")
        options = {name: getattr(sync, name) for name in limits}
        self.scheduler = AsyncScheduler(self.block_manager, **options, eos_token_ids=sync.eos_token_ids)
        self.device = ShadowDevice(self.options["block_size"])
        self.in_flight: deque[tuple] = deque()
        self.stop_texts: dict[Request, list[int]] = {}  # two tokens that end a request, as a stop string does
        self.ends: dict[Request, list[int]] = defaultdict(list)  # how far each of its shares reached

    def add_request(self, request_id: str | None = None) -> None:
        super().add_request(request_id)
        request, rng = self.requests[-1], self.rng
        if rng.random() < 0.2:
            request.sampling_params = replace(request.sampling_params, stop_token_ids=[rng.randrange(VOCABULARY)])
        if rng.random() < 0.3:
            self.stop_texts[request] = self.tokens(2)

    def run(self) -> Counter:
        counts = super().run()
        while self.in_flight:  # left by an abort of all that was there
            self.end_step()
        assert not self.scheduler._in_flight and self.block_manager.num_free_blocks == self.num_blocks
        return counts

    def step(self) -> None:
        scheduler = self.scheduler
        known = {request: request.num_tokens + request.num_output_placeholders for request in scheduler.running}
        more = [request for request, num_known in known.items() if num_known < request.max_num_tokens]
        decoding = [request.request_id for request in more if request.num_computed_tokens == known[request] - 1]
        self.block_manager.allocated.clear()
        output = scheduler.schedule()
        self.check_step(output, decoding)
        requests = [scheduler.requests[share.request_id] for share in output.scheduled]
        before = {}
        for share, request in zip(output.scheduled, requests, strict=True):
            begin, end = share.num_computed_tokens, share.num_computed_tokens + len(share.token_ids)
            num_unknown = max(0, end - request.num_tokens)
            assert num_unknown <= 1 and share.token_ids == request.token_ids[begin:end] + [-1] * num_unknown
            assert share.is_last_chunk == (end >= request.num_tokens)
            assert end < request.max_num_tokens, "what is computed has no token after it that could be used"
            before[share.request_id] = request.token_ids[:begin]
            self.ends[request].append(end)
            self.counts["placeholders"] += num_unknown
            self.counts["chunks"] += not share.is_last_chunk
        self.in_flight.append((output, before, requests))
        self.abort_some(reuse_id=True)
        num_left = int(bool(output.scheduled) and self.rng.random() < 0.95)
        while len(self.in_flight) > num_left * scheduler.has_unfinished_requests:
            self.end_step()

    def check_step(self, output, decoding: list[str]) -> None:
        scheduler = self.scheduler
        check_scheduler(scheduler)
        given = shares(output)
        withdrawn = self.block_manager.allocated & output.preempted_req_ids - given.keys()
        self.counts["preemptions"] += len(output.preempted_req_ids)
        self.counts["withdrawn victims"] += len(withdrawn)
        assert len(given) == len(output.scheduled) and all(given.values())
        assert sum(given.values()) <= scheduler.max_num_batched_tokens
        assert output.num_free_blocks == self.block_manager.num_free_blocks
        if not output.preempted_req_ids:
            assert given or self.in_flight or not scheduler.requests, "nothing was done, and nothing will come"
            if len(decoding) <= scheduler.max_num_batched_tokens:
                assert given.keys() >= set(decoding), "a request that decodes was left out"

    def end_step(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        output, before, requests = self.in_flight[0]
        if self.failures_left > 0 and rng.random() < self.options["fail_rate"]:
            self.failures_left -= 1
            for each, *_ in self.in_flight:
                self.device.fail(each, rng)
            self.abort_some(reuse_id=True)
            self.in_flight.clear()
            scheduler.requeue_running()
            self.counts["failed steps"] += 1
        else:
            sampled = self.device.end(output, before)
            self.abort_some(reuse_id=True)
            for request, tokens in zip(requests, sampled, strict=True):
                ended = request.status.finish_reason in ("stop", "length")
                self.counts["dropped after an end"] += bool(tokens) and ended
                self.counts["dropped after a preemption"] += bool(tokens) and request.status is RequestStatus.PREEMPTED
            scheduler.update_from_output(output, sampled)
            self.in_flight.popleft()
            self.look_for_stop_texts(requests)
            self.abort_some(reuse_id=True)
        check_scheduler(scheduler)

    def look_for_stop_texts(self, requests: list[Request]) -> None:
        for request in requests:
            stop = self.stop_texts.get(request)
            if stop and request.output_token_ids[-2:] == stop:
                if request.status in (RequestStatus.RUNNING, RequestStatus.FINISHED_LENGTH_CAPPED):
                    self.scheduler.finish_request(request, RequestStatus.FINISHED_STOPPED, request.num_tokens, "text")

    def check_output(self, request: Request) -> None:
        """Against the synchronous scheduler, which has this request only."""
        alone = Request("alone", request.token_ids[: request.num_prompt_tokens], request.sampling_params)
        generate_alone(alone, self.scheduler.max_model_len)
        expected, status, reason = alone.output_token_ids, alone.status, alone.stop_reason
        for end in range(2, len(expected) + (status is RequestStatus.FINISHED_LENGTH_CAPPED)):
            if expected[end - 2 : end] == self.stop_texts.get(request):
                expected, status, reason = expected[:end], RequestStatus.FINISHED_STOPPED, "text"
                break
        if request.status.finish_reason == "abort":
            assert expected[: len(request.output_token_ids)] == request.output_token_ids
            return
        assert (request.output_token_ids, request.status, request.stop_reason) == (expected, status, reason)
        stopped, ends = status is RequestStatus.FINISHED_STOPPED, self.ends[request]
        assert max(ends) <= request.num_tokens - (not stopped), "it was computed beyond its end"
        assert ends.count(request.num_tokens) <= 1 + self.counts["failed steps"], "more than one token was for nothing"
        how = {None: "EOS" if stopped else "length", "text": "text"}.get(reason, "id")
        self.counts[f"stopped by {how}"] += 1


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_outputs_are_the_synchronous_schedulers_with_one_step_in_flight(chunk):
    run_cases(map(AsyncShadowRun, range(chunk, NUM_CASES, NUM_CHUNKS)), EVENTS)


def test_a_run_on_the_shadow_device_notices_who_takes_the_wrong_steps_tokens(monkeypatch):
    """The test above would see a runner whose placeholders are always those of the first step."""
    end = ShadowDevice.end

    def end_with_old_samples(self, output, known):
        old = dict(self.sampled)
        sampled = end(self, output, known)
        self.sampled |= old
        return sampled

    monkeypatch.setattr(ShadowDevice, "end", end_with_old_samples)
    with pytest.raises(AssertionError):
        for seed in range(100):
            AsyncShadowRun(seed).run()


def make_async(num_blocks=20, block_size=4, **options) -> AsyncScheduler:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    return AsyncScheduler(BlockManager(num_blocks, block_size), **limits | options)


def counters(request: Request) -> tuple[int, int, int]:
    return request.num_tokens, request.num_output_placeholders, request.num_computed_tokens


def test_the_modules_own_example_is_what_happens():
    scheduler, request = make_async(), make_request("A", 5)
    scheduler.add_request(request)
    first = scheduler.schedule()
    assert counters(request) == (5, 1, 5)
    second = scheduler.schedule()
    assert counters(request) == (5, 2, 6) and second.scheduled[0].token_ids == [-1]
    scheduler.update_from_output(first, [[7]])
    assert counters(request) == (6, 1, 6)
    third = scheduler.schedule()
    assert counters(request) == (6, 2, 7) and third.scheduled[0].token_ids == [-1]
    scheduler.update_from_output(second, [[8]])
    scheduler.update_from_output(third, [[9]])
    assert request.output_token_ids == [7, 8, 9] and counters(request) == (8, 0, 7)


def test_an_end_by_length_is_known_in_advance():
    scheduler, request = make_async(), make_request("A", 5, max_tokens=2)
    scheduler.add_request(request)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert shares(first) == {"A": 5} and shares(second) == {"A": 1} and not third.scheduled
    assert scheduler.update_from_output(first, [[7]]) == []
    assert scheduler.update_from_output(second, [[8]]) == [request] and request.output_token_ids == [7, 8]


@pytest.mark.parametrize("eos,more", [({EOS}, {"stop_token_ids": [9]}), ({9}, {})], ids=["stop id", "EOS"])
def test_an_end_by_id_drops_the_one_token_computed_meanwhile_and_its_blocks_are_free_at_once(eos, more):
    scheduler, request = make_async(eos_token_ids=eos), make_request("A", 4, **more)
    scheduler.add_request(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.update_from_output(first, [[9]]) == [request]
    assert scheduler.block_manager.num_free_blocks == 20 and not scheduler.has_unfinished_requests
    assert not scheduler.schedule().scheduled
    assert scheduler.update_from_output(second, [[8]]) == [] and request.output_token_ids == [9]
    check_scheduler(scheduler)


def test_a_token_of_a_request_preempted_meanwhile_is_sampled_again():
    scheduler = make_async(num_blocks=2, block_size=4)
    a, b = make_request("A", 4, max_tokens=4), make_request("B", 4, max_tokens=4)
    scheduler.add_request(a), scheduler.add_request(b)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.preempted_req_ids == {"B"} and shares(second) == {"A": 1}
    scheduler.update_from_output(first, [[7], [8]])
    assert counters(b) == (4, 0, 0) and b.output_token_ids == [] and names(scheduler.waiting) == ["B"]
    while scheduler.has_unfinished_requests:
        third = scheduler.schedule()
        scheduler.update_from_output(second, [[8]] * len(second.scheduled))
        check_scheduler(scheduler)
        second = third
    assert len(a.output_token_ids) == len(b.output_token_ids) == 4 and b.num_preemptions == 1


def test_generated_tokens_are_found_by_the_next_prompt_as_without_a_step_in_flight():
    """Up to the last block: when its last token is known, nothing more is allocated that would let it be found."""
    num_cached = []
    for kind in (Scheduler, AsyncScheduler):
        limits = dict(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
        scheduler, in_flight = kind(BlockManager(20, 4), **limits), deque()
        first, token_ids = Request("first", range(10, 15), SamplingParams(max_tokens=20)), iter(range(100, 150))
        scheduler.add_request(first)
        while scheduler.has_unfinished_requests:
            in_flight.append(scheduler.schedule())
            num_left = int(kind is AsyncScheduler and bool(in_flight[-1].scheduled))
            while len(in_flight) > num_left:
                output = in_flight.popleft()
                scheduler.update_from_output(output, [[next(token_ids)] for _ in output.scheduled])
        second = Request("second", first.token_ids, SamplingParams())
        scheduler.add_request(second)
        scheduler.schedule()
        num_cached.append(second.num_cached_tokens)
    assert num_cached[0] == 24 and num_cached[1] >= 20


def test_the_class_is_short():
    assert len(inspect.getsource(AsyncScheduler).splitlines()) <= 70


# With models from here on.


def make_llm(folder, async_scheduling, eos=(), **options):
    sizes = dict(block_size=4, max_model_len=64, num_gpu_blocks_override=64)
    llm = LLM(folder, async_scheduling=async_scheduling, **sizes | options)
    llm.scheduler.eos_token_ids |= frozenset(eos)
    return llm


@pytest.fixture(scope="module")
def plain(llama):
    """A synchronous engine with room for all."""
    return LLM(llama[0], block_size=4, max_model_len=64, num_gpu_blocks_override=400, async_scheduling=False)


def make_workload(plain, seed: int | str, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, some with a common beginning, each with its own way to choose tokens and its own way to end."""
    rng = random.Random(seed)

    def tokens(n):
        return [rng.randrange(2, 288) for _ in range(n)]

    prefix, prompts, params = tokens(12), [], []
    for _ in range(count):
        prompts.append(prefix[: rng.choice([0, 0, 9, 12])] + tokens(rng.choice([1, 2, 5, 17])))
        temperature, logprobs = rng.choice([0, 0, 0.8, 1.2]), rng.choice([None, None, 0, 3])
        chosen = dict(temperature=temperature, seed=rng.randrange(2**32), logprobs=logprobs)
        params.append(SamplingParams(**chosen, max_tokens=rng.choice([1, 2, 8, 24, 24]), ignore_eos=True))
    for i, output in enumerate(plain.generate(prompts, params, use_tqdm=False)):
        text, end = output.outputs[0].text, rng.choice(["length", "length or EOS", "id", "text", "text"])
        begin = rng.randrange(max(1, len(text)))
        if end == "length or EOS":
            params[i] = replace(params[i], ignore_eos=False)
        elif end == "id":
            params[i] = replace(params[i], stop_token_ids=[rng.choice(output.outputs[0].token_ids)])
        elif end == "text" and text:
            params[i] = replace(params[i], stop=[text[begin : begin + rng.randint(1, 4)], "zebra"])
    return list(zip(prompts, params, strict=True))


EVERY_17TH = range(2, 288, 17)  # of the vocabulary ends a request, so that some requests end so


def serve(llm, workload, seed: int | str, num_aborted: int = 0) -> dict[str, object]:
    """The last output of each request. They join while others run, and the last ones are aborted on their way."""
    rng, outputs, step = random.Random(seed), {}, 0
    by_priority = llm.config.scheduling_policy == "priority"
    arrivals = list(accumulate((rng.choice([0, 0, 1, 4]) for _ in workload), initial=0))
    aborts = {str(i): arrivals[i] + rng.randint(1, 12) for i in range(len(workload) - num_aborted, len(workload))}
    todo = [(str(i), prompt, params, float(i), i % 3 * by_priority) for i, (prompt, params) in enumerate(workload)]
    while todo or llm.has_unfinished_requests():
        while todo and arrivals[len(workload) - len(todo)] <= step:
            llm.add_request(*todo.pop(0))
        llm.abort_request([request_id for request_id, when in aborts.items() if when == step])
        outputs |= {output.request_id: output for output in llm.step()}
        check_scheduler(llm.scheduler)
        step += 1
        assert step < 2000
    assert_whole(llm)
    return outputs


def assert_whole(llm) -> None:
    """Nobody holds a block or a row, and the worker has nothing left to do."""
    assert not llm.has_unfinished_requests() and not llm._in_flight and not llm.scheduler._in_flight
    check_scheduler(llm.scheduler)
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks and not llm._states
    assert len(llm.runner._rows) + len(llm.runner._free_rows) == llm.config.max_num_seqs
    assert llm.runner._worker is None or llm.runner._worker._work_queue.empty()


def assert_same(outputs, expected) -> None:
    """Of two RequestOutputs, or of two lists of them."""
    if isinstance(outputs, list):
        for pair in zip(outputs, expected, strict=True):
            assert_same(*pair)
        return
    (one,), (other,) = outputs.outputs, expected.outputs
    assert outputs.finished and expected.finished and outputs.prompt_token_ids == expected.prompt_token_ids
    assert (one.token_ids, one.text) == (other.token_ids, other.text)
    assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
    assert (one.logprobs is None) == (other.logprobs is None)
    assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
    for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(abs(mine[i].logprob - theirs[i].logprob) < 1e-4 for i in mine)


@pytest.mark.parametrize("max_num_seqs", [2, 8])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", [16, 64])
@pytest.mark.parametrize("budget", [3, 9, 64])
def test_outputs_are_the_same_with_a_step_in_flight(llama, plain, budget, num_blocks, caching, policy, max_num_seqs):
    options = dict(max_num_batched_tokens=budget, num_gpu_blocks_override=num_blocks, enable_prefix_caching=caching)
    options |= dict(scheduling_policy=policy, max_num_seqs=max_num_seqs, eos=EVERY_17TH)
    seed = str(options)
    workload, aborted = make_workload(plain, seed, 10), {"8", "9"}
    llm = make_llm(llama[0], True, **options)
    expected = serve(make_llm(llama[0], False, **options), workload, seed, len(aborted))
    outputs = serve(llm, workload, seed, len(aborted))
    assert outputs.keys() | aborted == expected.keys() | aborted == set(map(str, range(10)))
    for request_id, output in outputs.items():
        if request_id not in aborted:
            assert_same(output, expected[request_id])
        elif request_id in expected:
            ids, others = output.outputs[0].token_ids, expected[request_id].outputs[0].token_ids
            assert all(a == b for a, b in zip(ids, others, strict=False))
    prompts, params = map(list, zip(*workload[:8], strict=True))
    again = llm.generate(prompts, params, use_tqdm=False)
    assert_same(again, [expected[str(i)] for i in range(8)])
    if num_blocks == 16 and max_num_seqs == 8 and budget == 64:
        assert llm.get_metrics()["num_preemptions"] > 0
    assert_whole(llm)


def test_every_way_to_end_is_among_the_workloads(llama, plain):
    ends = Counter()
    for seed in range(4):
        for output in serve(make_llm(llama[0], True, EVERY_17TH), make_workload(plain, seed, 10), seed).values():
            reason = output.outputs[0].stop_reason
            ends[output.outputs[0].finish_reason, type(reason).__name__] += 1
    assert ends.keys() == {("length", "NoneType"), ("stop", "NoneType"), ("stop", "int"), ("stop", "str")}


def test_counters_of_tokens_are_the_same_with_a_step_in_flight(llama, plain):
    workload = make_workload(plain, 5, 10)
    prompts, params = map(list, zip(*workload, strict=True))
    counted = []
    for on in (False, True):
        llm = make_llm(llama[0], on)
        llm.generate(prompts, params, use_tqdm=False)
        counted.append(llm.get_metrics())
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "recomputed_tokens"):
        assert counted[0][name] == counted[1][name], name
    assert counted[0]["num_steps"] <= counted[1]["num_steps"] <= counted[0]["num_steps"] + 10


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_step_returns_who_got_a_token_and_nobody_else(llama, plain):
    """A request that ended, or was aborted, has no news when the token that was computed for nothing arrives."""
    (whole,) = plain.generate([5, 6, 7], GREEDY, use_tqdm=False)
    stop = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[whole.outputs[0].token_ids[3]])
    lengths = []
    for on in (False, True):
        llm, seen = make_llm(llama[0], on), defaultdict(list)
        llm.add_request("stops", [5, 6, 7], stop)
        llm.add_request("runs on", [8, 9], GREEDY)
        llm.add_request("aborted", [10, 11], GREEDY)
        while llm.has_unfinished_requests():
            for output in llm.step():
                seen[output.request_id].append(len(output.outputs[0].token_ids))
                if len(seen["aborted"]) == 4:
                    llm.abort_request("aborted")
        lengths.append(dict(seen))
    assert lengths[0] == {"stops": [1, 2, 3, 4], "runs on": list(range(1, 13)), "aborted": [1, 2, 3, 4]}
    assert lengths[1] == lengths[0]


def test_step_does_not_return_a_preempted_request_whose_token_was_dropped(llama):
    llm = make_llm(llama[0], True, num_gpu_blocks_override=16, max_num_seqs=8, enable_prefix_caching=False)
    seen = defaultdict(list)
    for i in range(6):
        llm.add_request(str(i), [20 + i] * 10, replace(GREEDY, max_tokens=30))
    while llm.has_unfinished_requests():
        for output in llm.step():
            seen[output.request_id].append(len(output.outputs[0].token_ids))
    assert llm.get_metrics()["num_preemptions"] > 0
    assert list(seen.values()) == [list(range(1, 31))] * 6


def test_a_stream_closed_in_the_middle_leaves_the_others_as_they_are(llama, plain):
    llm, params = make_llm(llama[0], True), replace(GREEDY, max_tokens=20)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    expected = plain.generate(prompts, params, use_tqdm=False)
    for num_read in range(1, 12, 2):
        outputs = {}
        llm.add_request("other", prompts[0], params)
        kept, closed = llm.generate_stream(prompts[1:2], params), llm.generate_stream(prompts[2:], params)
        for _ in range(num_read):
            next(closed), next(kept)
        closed.close()
        assert len(llm.scheduler.requests) == 2
        outputs["kept"] = [*kept][-1]
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
        again = llm.generate(prompts, params, use_tqdm=False)
        assert_same([outputs["kept"], *again], [expected[1], *expected])
        assert "other" not in outputs or outputs["other"].outputs[0].token_ids == expected[0].outputs[0].token_ids
        assert_whole(llm)


def test_an_id_may_be_used_again_while_the_aborted_requests_step_is_in_flight(llama, plain):
    expected = plain.generate([[5, 6, 7], [9] * 9], GREEDY, use_tqdm=False)
    llm = make_llm(llama[0], True, max_num_seqs=2)
    for num_steps in range(1, 8):
        outputs = {}
        llm.add_request("other", [5, 6, 7], GREEDY)
        llm.add_request("same", [40, 41], GREEDY)
        for _ in range(num_steps):
            outputs |= {output.request_id: output for output in llm.step()}
        llm.abort_request("same")
        llm.add_request("same", [9] * 9, GREEDY)
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
        assert_same([outputs["other"], outputs["same"]], expected)
        assert_whole(llm)


# The device's clock.


class SlowDevice:
    """Steps of a runner take `delay` seconds each, whatever they compute, and are written down as they run."""

    def __init__(self, runner, delay=lambda: 0.0, before: bool = False):
        self.compute, self.delay, self.before = runner._compute, delay, before
        self.begun, self.num_ended, self.threads, self.failing = [], 0, set(), {}
        runner._compute = self.run

    def run(self, packed, *args):
        begin, delay = time.perf_counter(), self.delay()
        assert len(self.begun) == self.num_ended, "two steps at once"
        self.begun.append(packed)
        self.threads.add(threading.get_ident())
        try:
            if self.before:  # what the host changes meanwhile must not be the step's
                time.sleep(delay)
            if error := self.failing.pop(len(self.begun), None):
                raise error
            return self.compute(packed, *args)
        finally:
            time.sleep(max(0, begin + delay - time.perf_counter()))
            self.num_ended += 1


def time_per_step(llm, device_delay: float, host_delay: float) -> float:
    """The median over steps that decode, with a device and a host as slow as that."""
    SlowDevice(llm.runner, lambda: device_delay)
    schedule = llm.scheduler.schedule
    llm.scheduler.schedule = lambda: (time.sleep(host_delay), schedule())[1]
    for i in range(3):
        llm.add_request(str(i), [5 + i] * 4, replace(GREEDY, max_tokens=40))
    times = []
    for _ in range(14):
        llm.step()
        times.append(time.perf_counter())
    llm.abort_request([*llm.scheduler.requests])
    return median(b - a for a, b in zip(times[3:], times[4:], strict=False))


@pytest.mark.parametrize("device_delay,host_delay", [(0.06, 0.036), (0.036, 0.06)])
def test_a_step_takes_the_devices_time_or_the_hosts_and_not_both(llama, device_delay, host_delay):
    both, longer, measured = device_delay + host_delay, max(device_delay, host_delay), []
    for _ in range(3):
        on, off = (time_per_step(make_llm(llama[0], x), device_delay, host_delay) for x in (True, False))
        measured.append((on, off))
        if longer <= on <= 1.05 * longer and both <= off <= 1.15 * both:
            return
    raise AssertionError(f"{measured} of {longer} and {both} seconds a step")


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("before", [False, True])
def test_steps_run_one_after_the_other_and_blocks_change_hands_at_once(llama, plain, before, policy, caching):
    """The device falls behind at random, so the host hands out blocks that a step in flight is yet to write."""
    options = dict(num_gpu_blocks_override=16, max_num_batched_tokens=24, max_num_seqs=6, eos=EVERY_17TH)
    options |= dict(enable_prefix_caching=caching, scheduling_policy=policy)
    workload = [(prompt, replace(params, max_tokens=40)) for prompt, params in make_workload(plain, 77, 20)]
    expected = serve(make_llm(llama[0], False, **options), workload, 3)
    llm, rng, launched = make_llm(llama[0], True, **options), random.Random(0), []
    device = SlowDevice(llm.runner, lambda: rng.choice([0, 0, 0.001, 0.003]), before)
    pack = llm.runner._pack

    def remember(*args):
        launched.append(pack(*args))
        return launched[-1]

    llm.runner._pack = remember
    outputs = serve(llm, workload, 3)
    assert outputs.keys() == expected.keys() and len(outputs) == 20
    for request_id, output in outputs.items():
        assert_same(output, expected[request_id])
    assert [id(packed) for packed in device.begun] == [id(packed[0]) for packed in launched]
    assert len(device.threads) == 1 and threading.get_ident() not in device.threads
    assert llm.get_metrics()["num_preemptions"] >= 5


def test_the_host_does_not_wait_for_the_step_that_it_launches(llama):
    llm, may_end = make_llm(llama[0], True), threading.Event()
    compute = llm.runner._compute
    llm.runner._compute = lambda *args: (may_end.wait(10), compute(*args))[1]
    llm.add_request("a", [5, 6, 7], GREEDY)
    assert llm.step() == [] and len(llm._in_flight) == 1 and not may_end.is_set()
    may_end.set()
    assert [len(output.outputs[0].token_ids) for output in llm.step() + llm.step()] == [1, 2]


def test_a_step_is_launched_before_the_one_in_flight_is_waited_for(llama):
    llm, events = make_llm(llama[0], True), []
    schedule, launch, update = llm.scheduler.schedule, llm.runner.launch, llm.scheduler.update_from_output

    def launch_and_tell(output):
        wait = launch(output)
        events.append(f"launch {output.step}")
        return lambda: (events.append(f"wait {output.step}"), wait())[1]

    llm.scheduler.schedule = lambda: (events.append("schedule"), schedule())[1]
    llm.runner.launch = launch_and_tell
    llm.scheduler.update_from_output = lambda output, ids: (events.append(f"update {output.step}"), update(output, ids))
    llm.generate([5, 6], replace(GREEDY, max_tokens=3), use_tqdm=False)
    assert events == [
        "schedule", "launch 0", "schedule", "launch 1", "wait 0", "update 0", "schedule", "launch 2", "wait 1",
        "update 1", "schedule", "launch 3", "wait 2", "update 2", "wait 3", "update 3",
    ]  # fmt: skip


# Failures.

PROMPTS = [[5, 6, 7, 8, 9], [6, 7], list(range(30, 50))]


@pytest.fixture(scope="module")
def expected(plain):
    return plain.generate(PROMPTS, GREEDY, use_tqdm=False)


def assert_requeued(llm, num_requests: int) -> None:
    assert not llm._in_flight and not llm.scheduler._in_flight and not llm.scheduler.running
    assert len(llm.scheduler.waiting) == len(llm.scheduler.requests) == num_requests
    assert all(counters(request)[1:] == (0, 0) for request in llm.scheduler.waiting)
    assert llm.block_manager.num_free_blocks == llm.block_manager.num_blocks
    check_scheduler(llm.scheduler)


@pytest.mark.parametrize("failing_step", [1, 2, 3, 6, 11])
def test_a_step_that_fails_takes_the_one_in_flight_with_it_and_both_are_run_again(llama, expected, failing_step):
    llm, outputs = make_llm(llama[0], True, max_num_batched_tokens=16), {}
    device = SlowDevice(llm.runner, lambda: 0.005)
    device.failing = {failing_step: RuntimeError("out of memory")}
    for i, prompt in enumerate(PROMPTS):
        llm.add_request(str(i), prompt, GREEDY)
    with pytest.raises(RuntimeError, match="out of memory"):
        while True:
            outputs |= {output.request_id: output for output in llm.step()}
    assert len(device.begun) == device.num_ended == failing_step + 1, "the one in flight has not ended"
    assert_requeued(llm, len(PROMPTS))
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    assert_same([outputs[str(i)] for i in range(3)], expected)
    assert {output.metrics.num_preemptions for output in outputs.values()} <= {0, 1}
    assert_whole(llm)


def test_repeated_failures_leak_neither_blocks_nor_rows(llama, expected):
    llm = make_llm(llama[0], True, max_num_seqs=2, num_gpu_blocks_override=16)
    device = SlowDevice(llm.runner)
    for failing_step in (1, 2, 3, 4, 5, 7, 9):
        device.failing = {len(device.begun) + failing_step: RuntimeError("out of memory")}
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_whole(llm)
        assert_same(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
        assert_whole(llm)


def test_a_failure_of_what_was_computed_for_nothing_takes_no_output_away(llama, expected):
    """The request has ended by a stop id when the step in flight fails, which computes one token more of it."""
    llm, outputs = make_llm(llama[0], True), {}
    stop_id = expected[0].outputs[0].token_ids[2]
    device = SlowDevice(llm.runner)
    device.failing = {4: RuntimeError("out of memory")}
    llm.add_request("a", PROMPTS[0], replace(GREEDY, stop_token_ids=[stop_id]))
    while llm.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in llm.step()}
        except RuntimeError:
            outputs |= {output.request_id: output for output in llm.step()}
    assert len(device.begun) == 4 and outputs["a"].finished
    assert_whole(llm)


def serve_poisoned(llm, workload, token_ids: list[int]) -> list:
    """Whoever attends to one of these tokens has logits that are not finite."""
    llm.runner.model.model.embed_tokens.weight.data[token_ids] = float("nan")
    outputs = serve(llm, workload, 5)
    return [outputs[str(i)].outputs[0] for i in range(len(workload))]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_blocks", [16, 80])
def test_a_request_whose_logits_are_not_finite_fails_alone(llama, plain, num_blocks, caching):
    """Its blocks go to others at once, while the step in flight still writes to them what is not finite either."""
    options = dict(max_num_seqs=6, max_num_batched_tokens=24, num_gpu_blocks_override=num_blocks)
    options |= dict(enable_prefix_caching=caching)
    workload = [(prompt, replace(params, logprobs=None)) for prompt, params in make_workload(plain, 99, 40)]
    outputs = plain.generate(*map(list, zip(*workload, strict=True)), use_tqdm=False)
    sampled = Counter(token_id for output in outputs for token_id in output.outputs[0].token_ids)
    token_ids = [token_id for token_id, _ in sampled.most_common(3)]
    expected = serve_poisoned(make_llm(llama[0], False, **options), workload, token_ids)
    outputs = serve_poisoned(make_llm(llama[0], True, **options), workload, token_ids)
    for output, other in zip(outputs, expected, strict=True):
        assert (output.token_ids, output.text) == (other.token_ids, other.text)
        assert (output.finish_reason, output.stop_reason) == (other.finish_reason, other.stop_reason)
    ends = Counter(output.finish_reason for output in outputs)
    assert ends.keys() == {"error", "length", "stop"} and min(ends.values()) >= 5


@pytest.mark.parametrize("on", [False, True])
def test_a_request_that_fails_for_its_logits_may_have_asked_for_logprobs(llama, on):
    workload = [([5, 6, 7], replace(GREEDY, logprobs=n)) for n in (0, None, 2)]
    workload.append(([7, 8], replace(GREEDY, logprobs=2)))
    outputs = serve_poisoned(make_llm(llama[0], on), workload, [6])
    assert [output.finish_reason for output in outputs] == ["error"] * 3 + ["length"]
    assert len(outputs[3].logprobs) == 12


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_what_is_not_finite_in_blocks_that_change_hands_makes_nobody_else_fail(llama, on, how):
    """Nobody had seen the logits of the first chunks when the request left."""
    options = dict(num_gpu_blocks_override=10, max_model_len=40, max_num_batched_tokens=8, enable_prefix_caching=False)
    llm, outputs = make_llm(llama[0], on, **options), {}
    llm.runner.model.model.embed_tokens.weight.data[6] = float("nan")
    if how == "aborted":
        llm.add_request("poisoned", [6] * 20, GREEDY)
        llm.step(), llm.step()
        llm.abort_request("poisoned")
        llm.add_request("other", [7, 8, 9], GREEDY)
    else:
        llm.add_request("other", [7, 8, 9] * 2, replace(GREEDY, max_tokens=30))
        llm.step(), llm.step()
        llm.add_request("poisoned", [6] * 30, replace(GREEDY, max_tokens=8))
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    assert outputs["other"].outputs[0].finish_reason == "length"
    if how == "preempted":
        assert outputs["poisoned"].outputs[0].finish_reason == "error"
        assert outputs["poisoned"].metrics.num_preemptions > 0


@pytest.mark.parametrize("on", [False, True])
def test_what_is_not_finite_in_blocks_of_others_makes_nobody_fail(llama, on):
    """Rows of unequal length are computed together: the shorter one's table goes on with whatever was there before."""
    llm, outputs = make_llm(llama[0], on, long_prefill_token_threshold=4, enable_prefix_caching=False), {}
    llm.runner.model.model.embed_tokens.weight.data[6] = float("nan")
    for name, prompt in (("poisoned", [6] * 40), ("short", [7] * 9), ("long", [8] * 13)):
        llm.add_request(name, prompt, GREEDY)
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    ends = {name: output.outputs[0].finish_reason for name, output in outputs.items()}
    assert ends == {"poisoned": "error", "short": "length", "long": "length"}


def interrupt(llm, where: str, after: bool, call: int) -> None:
    """Ctrl-C in a step's schedule, launch, result or update: before it begins, or when it has just ended."""
    calls = []

    def interrupting(function):
        def run(*args):
            calls.append(function)
            if len(calls) == call and not after:
                raise KeyboardInterrupt
            done = function(*args)
            if len(calls) == call and after:
                raise KeyboardInterrupt
            return done

        return run

    launch = llm.runner.launch
    if where == "schedule":
        llm.scheduler.schedule = interrupting(llm.scheduler.schedule)
    elif where == "launch":
        llm.runner.launch = interrupting(launch)
    elif where == "result":
        llm.runner.launch = lambda output: interrupting(launch(output))
    else:
        llm.scheduler.update_from_output = interrupting(llm.scheduler.update_from_output)


PLACES = [(where, after) for where in ("schedule", "launch", "result", "update") for after in (False, True)]
IDS = [f"{'after' if after else 'before'} {where}" for where, after in PLACES]


@pytest.mark.parametrize("call", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("where,after", PLACES, ids=IDS)
def test_an_interrupted_step_is_run_again(llama, expected, where, after, call):
    llm, outputs = make_llm(llama[0], True, max_num_batched_tokens=16), {}
    device = SlowDevice(llm.runner, lambda: 0.003)
    interrupt(llm, where, after, call)
    for i, prompt in enumerate(PROMPTS):
        llm.add_request(str(i), prompt, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        while True:
            outputs |= {output.request_id: output for output in llm.step()}
    assert len(device.begun) == device.num_ended, "a step is still running"
    assert not llm._in_flight and not llm.scheduler._in_flight
    check_scheduler(llm.scheduler)
    for _ in range(200):
        outputs |= {output.request_id: output for output in llm.step()}
        check_scheduler(llm.scheduler)
    assert_same([outputs[str(i)] for i in range(3)], expected)
    assert_whole(llm)


@pytest.mark.parametrize("where,after", PLACES, ids=IDS)
def test_no_request_stays_when_generate_is_interrupted(llama, expected, where, after):
    llm = make_llm(llama[0], True, max_num_seqs=2)
    for call in (1, 2, 5, 11, 12, 13, 14):  # 2 rows, so the third would miss what the others had not given back
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.runner, "launch", llm.runner.launch)
            patch.setattr(llm.scheduler, "schedule", llm.scheduler.schedule)
            patch.setattr(llm.scheduler, "update_from_output", llm.scheduler.update_from_output)
            interrupt(llm, where, after, call)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert_whole(llm)
    assert_same(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    assert_whole(llm)


# Which scheduler, which device.


@pytest.mark.parametrize("max_num_seqs", [3, 8])
def test_a_replayed_graph_takes_placeholders_too(max_num_seqs, llama, plain, fake_graphs):  # noqa: F811
    options = dict(max_num_seqs=max_num_seqs, max_num_batched_tokens=24, num_gpu_blocks_override=32, eos=EVERY_17TH)
    workload = make_workload(plain, 21, 16)
    expected = serve(make_llm(llama[0], False, **options), workload, 1)
    llm = make_llm(llama[0], True, **options, attention_backend="flash_attn_3")
    llm.runner.capture_graphs(max_num_seqs)
    rng = random.Random(0)
    SlowDevice(llm.runner, lambda: rng.choice([0, 0.002]), before=True)
    outputs = serve(llm, workload, 1)
    assert outputs.keys() == expected.keys() and len(outputs) == 16
    for request_id, output in outputs.items():
        assert_same(output, expected[request_id])
    assert sum(graph.num_replays for graph in fake_graphs) >= 20


@pytest.mark.parametrize("wanted,kind", [(None, Scheduler), (False, Scheduler), (True, AsyncScheduler)])
def test_on_a_cpu_a_step_is_in_flight_only_if_somebody_asks_for_it(llama, wanted, kind):
    llm = make_llm(llama[0], wanted)
    assert type(llm.scheduler) is kind and (llm.runner._worker is not None) == (wanted is True)
    llm.add_request("a", [5, 6], GREEDY)
    assert len(llm.step()) == (0 if wanted else 1) and len(llm._in_flight) == (1 if wanted else 0)


@pytest.mark.parametrize("kind", [Scheduler, StaticBatchScheduler])
def test_a_scheduler_of_the_callers_own_has_no_step_in_flight(llama, expected, kind):
    llm = make_llm(llama[0], True)
    use_scheduler(llm, kind)
    assert_same(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
    llm.add_request("a", [5, 6], GREEDY)
    assert len(llm.step()) == 1 and not llm._in_flight


@pytest.mark.parametrize("drafts,wanted,on", [(0, None, True), (0, False, False), (0, True, True), (1, None, False)])
def test_on_cuda_a_step_is_in_flight_unless_there_are_drafts(llama, plain, monkeypatch, drafts, wanted, on):
    monkeypatch.setattr(model_runner, "_choose_device_and_dtype", lambda c: (torch.device("cuda"), torch.float32))
    monkeypatch.setattr(model_runner, "load_model", lambda *args: plain.runner.model)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=int))
    monkeypatch.setattr(ModelRunner, "_warm_up", lambda *args: None)
    options = dict(attention_backend="torch", num_gpu_blocks_override=4, async_scheduling=wanted, max_model_len=64)
    options |= dict(speculative_config={"num_speculative_tokens": 2} if drafts else None)
    config = EngineConfig(model=llama[0], **options).for_model(plain.config.hf_config, 288)
    with FakeTensorMode():
        runner = ModelRunner(config, None)
    assert runner.async_scheduling == on and runner._worker is None


def test_drafts_and_a_step_in_flight_exclude_each_other(llama):
    with pytest.raises(ValueError, match="async_scheduling"):
        make_llm(llama[0], True, speculative_config={"num_speculative_tokens": 2})
