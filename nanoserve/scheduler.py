"""How many tokens of which request to compute now (chapter 2.2, section 6; vLLM 0.32.0 v1/core/sched/scheduler.py).
There is no prefill phase and no decode phase. A request has tokens that are known (num_tokens_with_spec) and tokens
that are computed (num_computed_tokens); each step hands out a budget of tokens so that the second catches up with the
first. Chunked prefill, decoding, recomputing after preemption and verifying drafts are all this one subtraction.
Models, tensors and text are not known here."""

from bisect import insort
from collections.abc import Collection
from itertools import count
from typing import NamedTuple

from nanoserve.block_manager import BlockManager, cdiv
from nanoserve.request import Request, RequestStatus, SamplingParams, require


class ScheduledRequest(NamedTuple):
    """One request's share of a step. A tuple, since a step makes hundreds of them."""
    request_id: str
    token_ids: list[int]  # what to compute, drafts last
    num_computed_tokens: int  # position of the first
    block_ids: list[int]  # the request's whole block table
    num_spec_tokens: int  # how many of token_ids are drafts
    is_last_chunk: bool  # reaches the end of the known tokens, so it samples
    sampling_params: SamplingParams


class SchedulerOutput(NamedTuple):
    """One step, in scheduling order."""
    scheduled: list[ScheduledRequest]
    preempted_req_ids: set[str]  # lost their K/V since the previous output
    finished_req_ids: set[str]  # finished since the previous output, for whoever keeps state per request
    num_free_blocks: int
    step: int  # counts from 0


class Scheduler:
    """vLLM V1's: two queues and a token budget. A policy is one sort key, of arrival ("fcfs") or of (priority,
    arrival_time): the smallest waiting request is admitted first, the largest running one preempted first."""
    admits_while_running = True

    def __init__(self, block_manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int,
                 max_model_len: int, policy: str = "fcfs", long_prefill_token_threshold: int = 0,
                 eos_token_ids: Collection[int] = frozenset()):
        require(policy in ("fcfs", "priority"), "policy", "'fcfs' or 'priority'", policy)
        self.block_manager, self.policy, self.eos_token_ids = block_manager, policy, frozenset(eos_token_ids)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.long_prefill_token_threshold = max_model_len, long_prefill_token_threshold
        self.requests: dict[str, Request] = {}  # live, by id
        self.waiting: list[Request] = []  # sorted, next to be admitted first
        self.running: list[Request] = []  # in order of admission
        self._in_flight: dict[int, tuple] = {}  # by step, not yet seen by update_from_output: its output and requests
        self._preempted_req_ids, self._finished_req_ids = set(), set()  # for the next output
        self._arrivals, self._steps = count(), count()

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def check_request(self, request: Request) -> int:
        """The length at which the request ends. Raises ValueError if it could not get there even on an empty engine."""
        name, length, max_tokens = request.request_id, request.num_prompt_tokens, request.sampling_params.max_tokens
        require(name not in self.requests, "request_id", "that of no unfinished request", name)
        limit, num_there = self.max_model_len, self.block_manager.num_blocks
        require(0 < length < limit, f"the prompt length of request {name}", f"in [1, max_model_len={limit})", length)
        max_num_tokens = min(limit, length + (max_tokens or limit))
        num_blocks = cdiv(max_num_tokens - 1, self.block_manager.block_size)  # the last token is never computed
        what = f"the number of K/V blocks for {length} prompt tokens and {max_tokens=} of request {name}"
        require(num_blocks <= num_there, what, f"at most the cache's {num_there}", num_blocks)
        return max_num_tokens

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError as check_request does; then nothing is queued."""
        request.max_num_tokens = self.check_request(request)
        arrival = (request.priority, request.arrival_time, request.request_id)
        request.sort_key = arrival if self.policy == "priority" else (next(self._arrivals),)
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=lambda r: r.sort_key)

    def schedule(self) -> SchedulerOutput:
        """Share out one step's token budget: running requests first, then waiting ones (chapter 2.2, section 6.2).
        >>> scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=6, max_model_len=32)
        >>> for name in "AB":
        ...     scheduler.add_request(Request(name, [ord(name)] * 5, SamplingParams()))
        >>> [(s.request_id, len(s.token_ids), s.is_last_chunk) for s in scheduler.schedule().scheduled]
        [('A', 5, True), ('B', 1, False)]
        """
        budget, preempted = self.max_num_batched_tokens, False
        shares: dict[Request, int] = {}  # tokens of each, in scheduling order
        for request in self.running[:]:
            if request.status is not RequestStatus.RUNNING:
                continue  # the victim of a request before it
            num_new = self._num_new_tokens(request, request.num_computed_tokens, budget)
            if num_new == 0:
                continue
            victim = None
            while victim is not request and self.block_manager.allocate_slots(request, num_new) is None:
                victim = max(self.running, key=lambda r: r.sort_key[:2])  # of equals the one that runs longest, as vLLM
                budget += shares.pop(victim, 0)  # withdrawn from this step
                self._preempt(victim)
                preempted = True
            if victim is request:
                break
            shares[request] = num_new
            budget -= num_new
        max_running = self.max_num_seqs if self.admits_while_running or not self.running else 0
        while not preempted and budget > 0 and self.waiting and len(self.running) < max_running:
            request = self.waiting[0]
            hits = self.block_manager.get_computed_blocks(request)
            num_cached = len(hits) * self.block_manager.block_size
            num_new = self._num_new_tokens(request, num_cached, budget)
            if self.block_manager.allocate_slots(request, num_new, hits, full_sequence_must_fit=True) is None:
                break  # head of the line: nobody overtakes it
            self.running.append(self.waiting.pop(0))
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = num_cached
            request.status, request.num_computed_tokens = RequestStatus.RUNNING, num_cached
            shares[request] = num_new
            budget -= num_new
        return self._output(shares)

    def _num_known(self, request: Request) -> int:
        return request.num_tokens_with_spec

    def _num_new_tokens(self, request: Request, num_computed_tokens: int, budget: int) -> int:
        """What the request lacks, capped by the long-prefill threshold (if not alone), the budget and max_model_len."""
        num_new, threshold = self._num_known(request) - num_computed_tokens, self.long_prefill_token_threshold
        if 0 < threshold < num_new and len(self.requests) > 1:
            num_new = threshold
        return min(num_new, budget, self.max_model_len - 1 - num_computed_tokens)

    def _preempt(self, request: Request) -> None:
        """Free the blocks, keep the outputs: recompute is the only way back (chapter 2.2, section 6.3)."""
        self.running.remove(request)
        self.block_manager.free(request)
        self._start_over(request)
        insort(self.waiting, request, key=lambda r: r.sort_key)

    def _start_over(self, request: Request) -> None:
        request.status, request.spec_token_ids = RequestStatus.PREEMPTED, []
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.num_preemptions += 1
        self._preempted_req_ids.add(request.request_id)

    def _output(self, shares: dict[Request, int]) -> SchedulerOutput:
        """Freeze the step. From here on its tokens count as computed, though no kernel has run yet."""
        scheduled = []
        for request, num_new in shares.items():
            name, start, drafts = request.request_id, request.num_computed_tokens, ()
            request.num_computed_tokens = end = start + num_new
            token_ids, beyond = request.token_ids[start:end], end - request.num_tokens  # what is known
            if request.spec_token_ids:
                drafts, request.spec_token_ids = request.spec_token_ids[: max(0, beyond)], []
                token_ids += drafts
            elif beyond > 0:
                token_ids.append(-1)  # a step in flight is sampling it
            blocks, params = self.block_manager.block_table(name), request.sampling_params
            scheduled.append(ScheduledRequest(name, token_ids, start, blocks, len(drafts), beyond >= 0, params))
            request.num_in_flight_tokens += num_new
        output = SchedulerOutput(scheduled, self._preempted_req_ids, self._finished_req_ids,
                                 self.block_manager.num_free_blocks, next(self._steps))
        self._preempted_req_ids, self._finished_req_ids = set(), set()
        self._in_flight[output.step] = output, [*shares]
        return output

    def update_from_output(self, output: SchedulerOutput, sampled_token_ids: list[list[int]]) -> list[Request]:
        """Append what the step sampled; returns the requests that it finished. `sampled_token_ids` has a list for each
        scheduled one: [] if its prompt goes on, else accepted drafts and a token more, -1 if its logits are not finite.
        >>> scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32)
        >>> scheduler.add_request(Request("A", [7, 8, 9], SamplingParams(max_tokens=2)))
        >>> scheduler.update_from_output(scheduler.schedule(), [[5]])
        []
        >>> scheduler.update_from_output(scheduler.schedule(), [[6]])[0].output_token_ids
        [5, 6]
        """
        finished, (_, requests) = [], self._in_flight.pop(output.step)
        for share, request, token_ids in zip(output.scheduled, requests, sampled_token_ids, strict=True):
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_in_flight_tokens -= len(share.token_ids)
            if share.num_spec_tokens:
                request.num_computed_tokens -= share.num_spec_tokens + 1 - len(token_ids)  # rejected drafts
            for token_id in token_ids:
                if self._check_stop(request, token_id):
                    self._finish(request)
                    finished.append(request)
                    break
        if finished:
            self.running = [request for request in self.running if not request.status.is_finished]
        return finished

    def _check_stop(self, request: Request, token_id: int) -> bool:
        """Append it. Ids that end the output come before the lengths that do (vLLM v1/core/sched/utils.py)."""
        if token_id < 0:  # its logits were not finite, and neither may be its K/V, which nobody may find
            request.status, request.num_computed_tokens = RequestStatus.FINISHED_ERROR, 0
            return True
        is_eos = token_id in self.eos_token_ids and not request.sampling_params.ignore_eos
        if is_eos or token_id in (request.sampling_params.stop_token_ids or ()):
            request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, None if is_eos else token_id
        elif request.num_tokens + 1 >= request.max_num_tokens:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        request.token_ids.append(token_id)
        return request.status.is_finished

    def _finish(self, request: Request) -> None:
        self.block_manager.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)

    def update_draft_token_ids(self, draft_token_ids: dict[str, list[int]]) -> None:
        """Give running requests tokens to verify in the next step; drafts for anyone else are dropped."""
        for request_id, token_ids in draft_token_ids.items():
            if (request := self.requests.get(request_id)) and request.status is RequestStatus.RUNNING:
                request.spec_token_ids = list(token_ids)

    def finish_request(self, request: Request, status: RequestStatus, num_tokens: int, stop: str | None = None) -> None:
        """End a request from outside: its caller left, or its first `num_tokens` tokens came to a stop string."""
        before, request.status, request.stop_reason = request.status, status, stop
        del request.token_ids[num_tokens:]
        if not before.is_finished:  # it may be, by the length that the last token of its stop string reached
            (self.running if before is RequestStatus.RUNNING else self.waiting).remove(request)
            self._finish(request)

    def abort_request(self, request_id: str) -> None:
        """Drop a request and its blocks; no-op for an id that is not live. Tokens still on their way are ignored."""
        if request_id in self.requests:
            request = self.requests[request_id]
            self.finish_request(request, RequestStatus.FINISHED_ABORTED, request.num_tokens)

    def requeue_running(self) -> None:
        """A step failed or was interrupted, wherever that was: all that ran wait again, and no K/V is relied on."""
        self.block_manager.reset()
        for output, _ in self._in_flight.values():  # whoever keeps state by request may not know
            self._preempted_req_ids |= output.preempted_req_ids
            self._finished_req_ids |= output.finished_req_ids
        for request in [*self.requests.values()]:
            if request.status is RequestStatus.RUNNING:
                self._start_over(request)
            elif request.status.is_finished:
                self._finish(request)
        self.running, self._in_flight = [], {}
        self.waiting = sorted(self.requests.values(), key=lambda r: r.sort_key)


class StaticBatchScheduler(Scheduler):
    """The baseline of chapter 2.2, sections 2 and 3: a batch closes once it runs, the next starts when it has ended."""
    admits_while_running = False
