"""Lesson: nanoserve's scheduler makes vLLM's decisions, all of them, step by step.

A workload ends, uncompared from there on, where vLLM withdraws a request that it had already given tokens in this step
while prefix caching is on: vLLM then leaves blocks in its prefix cache that nobody has written, nanoserve does not.
"""

import os
import random
from collections import Counter

import pytest
from helpers_scheduler import check_scheduler
from lockstep.vllm_scheduler import VllmScheduler

from nanoserve.block_manager import BlockManager, cdiv
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import Scheduler

pytestmark = pytest.mark.vllm
NUM_WORKLOADS = int(os.environ.get("NANOSERVE_LOCKSTEP_WORKLOADS", "300"))
NUM_CHUNKS = 10
VOCABULARY = 5
EOS = 0
FAR_TOO_MANY_STEPS = 3000


class Lockstep:
    """One random workload, on both schedulers at once."""

    def __init__(self, seed: int, num_spec_tokens: int):
        self.rng = rng = random.Random(seed)
        self.num_spec_tokens = num_spec_tokens
        self.counts = Counter(workloads=1)
        self.caching = rng.random() < 0.6
        block_size = rng.randint(1, 8)
        max_model_len = rng.randint(4, 48)
        spare_blocks = rng.choice([0, 0, 0, 1, 1, 2, 4, 20])  # mostly few, for preemptions
        num_blocks = cdiv(max_model_len - 1, block_size) + spare_blocks
        options = {
            "max_num_seqs": rng.randint(1, 8),
            "max_num_batched_tokens": rng.choice([1, 2, 4, 8, 16, 32, 64]),
            "max_model_len": max_model_len,
            "policy": rng.choice(["fcfs", "priority"]),
            "long_prefill_token_threshold": rng.choice([0, 0, 1, 2, 4, 7]),
        }
        blocks = (num_blocks, block_size, self.caching)
        self.name = f"seed {seed}: blocks {blocks}, {options}, drafts {num_spec_tokens}"
        self.ours = Scheduler(BlockManager(*blocks), **options, eos_token_ids={EOS})
        self.theirs = VllmScheduler(*blocks, **options, num_spec_tokens=num_spec_tokens)
        self.prefixes = [self.tokens(rng.randint(1, 40)) for _ in range(rng.randint(1, 3))]
        self.requests: dict[str, Request] = {}
        num_requests = rng.randint(2, 14)
        last_arrival = rng.choice([0, 5, 20])
        self.arrivals = sorted(rng.randint(0, last_arrival) for _ in range(num_requests))
        self.arrival_times = rng.choices(range(rng.choice([3, 1000])), k=num_requests)  # in any order, equal ones too
        self.abort_rate = rng.choice([0, 0, 0.03, 0.1])

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, VOCABULARY) for _ in range(count)]

    def add_request(self) -> None:
        rng = self.rng
        prefix = rng.choice(self.prefixes)
        prompt = prefix[: rng.randint(0, len(prefix))] + self.tokens(rng.choice([0, 1, 1, 2, 5, 20]))
        longest = (self.ours.max_model_len - 1) // rng.choice([1, 2, 4])  # shorter ones have more to generate
        prompt = prompt[: rng.randint(1, max(1, longest))] or [1]
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 3, 8, 60, 60, 60]),
            ignore_eos=rng.random() < 0.9,
            stop_token_ids=rng.sample(range(VOCABULARY), k=rng.random() < 0.1),
        )
        finished = [request_id for request_id in self.requests if request_id not in self.ours.requests]
        reused = bool(finished) and rng.random() < 0.1
        request = Request(
            rng.choice(finished) if reused else f"r{len(self.requests)}",
            prompt,
            params,
            priority=rng.randint(0, 2),
            arrival_time=self.arrival_times.pop(),
        )
        self.ours.add_request(request)
        self.requests[request.request_id] = request
        self.theirs.add_request(request, EOS)

    def abort_some(self) -> None:
        if self.requests and self.rng.random() < self.abort_rate:
            request_id = self.rng.choice(list(self.requests))
            self.counts["aborts"] += request_id in self.ours.requests
            self.ours.abort_request(request_id)
            self.theirs.abort_request(request_id)

    def run(self) -> Counter:
        step = 0
        while self.arrivals or self.ours.has_unfinished_requests:
            while self.arrivals and self.arrivals[0] <= step:
                self.arrivals.pop(0)
                self.add_request()
            self.abort_some()
            if not self.step():
                break
            step += 1
            assert step < FAR_TOO_MANY_STEPS, self.name
        self.counts["prefix hits"] = sum(request.num_cached_tokens > 0 for request in self.requests.values())
        return self.counts

    def step(self) -> bool:
        """One step on both; False where they may part."""
        output = self.ours.schedule()
        their_output, withdrawn = self.theirs.schedule()
        parting = bool(withdrawn) and self.caching
        check_scheduler(self.ours)
        self.counts["steps"] += 1
        self.counts["preemptions"] += len(output.preempted_req_ids)
        self.counts["withdrawn victims"] += len(withdrawn)
        self.compare_outputs(output, their_output, block_ids=not parting)
        self.compare_states(block_ids=not parting)
        if parting:
            self.counts["workloads ended at a withdrawn victim"] += 1
            return False
        if not self.caching:  # with it, nanoserve forgets blocks that the step has yet to write
            self.abort_some()
        sampled = [self.sample(share) for share in output.scheduled]
        before = {request_id: request.num_tokens for request_id, request in self.ours.requests.items()}
        finished = self.ours.update_from_output(output, sampled)
        their_results = self.theirs.update_from_output(their_output, sampled)
        self.compare_results(before, finished, their_results)
        if self.num_spec_tokens:
            # Only for who sampled: vLLM ignores drafts for an unfinished prompt, nanoserve unless one token is missing.
            sampling = [share.request_id for share in output.scheduled if share.is_last_chunk]
            drafts = {request_id: self.tokens(self.rng.randint(0, self.num_spec_tokens)) for request_id in sampling}
            self.ours.update_draft_token_ids(drafts)
            self.theirs.update_draft_token_ids(drafts)
        self.compare_states()
        return True

    def sample(self, share) -> list[int]:
        """What a model would answer: nothing for an unfinished prompt, else the accepted drafts and one token more."""
        if not share.is_last_chunk:
            return []
        drafts = share.token_ids[len(share.token_ids) - share.num_spec_tokens :]
        num_accepted = next((i for i in range(len(drafts)) if self.rng.random() < 0.4), len(drafts))
        self.counts["drafts accepted"] += num_accepted
        self.counts["drafts rejected"] += len(drafts) - num_accepted
        return drafts[:num_accepted] + [self.rng.randrange(VOCABULARY)]

    def compare_outputs(self, output, theirs, block_ids: bool) -> None:
        ours = {share.request_id: len(share.token_ids) for share in output.scheduled}
        self.equal(list(ours.items()), list(theirs.num_scheduled_tokens.items()), "who, in order, and how many tokens")
        drafts = {s.request_id: s.token_ids[-s.num_spec_tokens :] for s in output.scheduled if s.num_spec_tokens}
        self.equal(drafts, theirs.scheduled_spec_decode_tokens, "drafts")
        for share in output.scheduled:
            request = self.theirs.requests[share.request_id]
            start = request.num_computed_tokens - len(share.token_ids)
            self.equal(share.num_computed_tokens, start, "position of the first token")
            known = request.all_token_ids[start : request.num_computed_tokens]
            self.equal(share.token_ids[: len(share.token_ids) - share.num_spec_tokens], known, "tokens")
            self.equal(share.is_last_chunk, request.num_computed_tokens >= request.num_tokens, "is_last_chunk")
            if block_ids:
                self.equal(share.block_ids, self.theirs.block_table(share.request_id), "block ids")
        self.equal(output.preempted_req_ids, theirs.preempted_req_ids, "preempted")
        self.equal(output.finished_req_ids, theirs.finished_req_ids, "finished before this step")
        free = self.theirs.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.equal(output.num_free_blocks, free, "free blocks")

    def compare_results(self, num_tokens_before, finished, theirs) -> None:
        ours = [
            (request_id, request.token_ids[num_tokens_before[request_id] :], request.status.finish_reason)
            for request_id, request in self.requests.items()
            if request_id in num_tokens_before and request.num_tokens > num_tokens_before[request_id]
        ]
        results = [(r.request_id, r.new_token_ids, r.finish_reason) for r in theirs]
        self.equal(sorted(ours), sorted(results), "new tokens and finish reasons")
        stops = [(r.request_id, r.stop_reason) for r in theirs if r.finish_reason]
        self.equal([(r.request_id, r.stop_reason) for r in finished], stops, "finished, and stop reasons")

    def compare_states(self, block_ids: bool = True) -> None:
        ours, theirs = self.ours, self.theirs.scheduler
        self.equal([r.request_id for r in ours.running], [r.request_id for r in theirs.running], "running")
        self.equal([r.request_id for r in ours.waiting], [r.request_id for r in theirs.waiting], "waiting")
        free = theirs.kv_cache_manager.block_pool.get_num_free_blocks()
        self.equal(ours.block_manager.num_free_blocks, free, "free blocks")
        self.equal(set(ours.requests), set(theirs.requests), "live requests")
        for request_id, request in self.requests.items():
            other = self.theirs.requests[request_id]
            self.equal(request.status.name, other.status.name, f"status of {request_id}")
            if request_id not in ours.requests:
                continue
            for name in "num_tokens num_computed_tokens num_in_flight_tokens num_preemptions spec_token_ids".split():
                self.equal(getattr(request, name), getattr(other, name), f"{name} of {request_id}")
            if request.num_preemptions or request in ours.running:
                cached = self.theirs.prefill_stats[request_id].num_local_cached_tokens
                self.equal(request.num_cached_tokens, cached, f"num_cached_tokens of {request_id}")
            table, other_table = ours.block_manager.block_table(request_id), self.theirs.block_table(request_id)
            if block_ids:
                self.equal(table, other_table, f"block table of {request_id}")
            else:
                self.equal(len(table), len(other_table), f"number of blocks of {request_id}")

    def equal(self, ours, theirs, what: str) -> None:
        assert ours == theirs, f"{what}: nanoserve {ours}, vLLM {theirs}; step {self.counts['steps']} of {self.name}"


def run_workloads(chunk: int, counts: Counter, drafts: bool) -> None:
    mine = Counter()
    for seed in range(chunk, NUM_WORKLOADS, NUM_CHUNKS):
        mine += Lockstep(seed, num_spec_tokens=1 + seed % 4 if drafts else 0).run()
    counts += mine
    if mine["workloads"] >= 30:
        assert mine["preemptions"] and mine["prefix hits"] and mine["aborts"], "these workloads are too tame"
        assert not drafts or (mine["drafts accepted"] and mine["drafts rejected"]), "these drafts are too tame"


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_lockstep(chunk, counts):
    run_workloads(chunk, counts, drafts=False)


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_lockstep_with_drafts(chunk, counts):
    run_workloads(chunk, counts, drafts=True)
