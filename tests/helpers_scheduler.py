"""Short ways to build requests and drive a scheduler; no model, no torch."""

from itertools import count

from nanoserve.block_manager import BlockManager, cdiv
from nanoserve.request import Request, RequestStatus, SamplingParams
from nanoserve.scheduler import Scheduler, SchedulerOutput

_fresh = count(1000, 1000)


def make_request(request_id: str, prompt, max_tokens: int = 16, priority: int = 0, arrival_time: float = 0.0, **params):
    """`prompt` is a list of token ids, or a number: that many tokens which no other request has."""
    if isinstance(prompt, int):
        first = next(_fresh)
        prompt = range(first, first + prompt)
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, **params), priority, arrival_time)


def make_scheduler(num_blocks: int = 100, block_size: int = 4, caching: bool = True, **options) -> Scheduler:
    longest = num_blocks * block_size + 1  # a request's last token is never computed
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 100, "max_model_len": min(64, longest)}
    return Scheduler(BlockManager(num_blocks, block_size, caching), **limits | options)


def answer(output: SchedulerOutput, token_id: int = 7) -> list[list[int]]:
    """What a model that rejects every draft and always says `token_id` would return."""
    return [[token_id] if share.is_last_chunk else [] for share in output.scheduled]


def step(scheduler: Scheduler, *new_requests: Request) -> SchedulerOutput:
    """Add the requests and run one step."""
    for request in new_requests:
        scheduler.add_request(request)
    output = scheduler.schedule()
    check_scheduler(scheduler)
    scheduler.update_from_output(output, answer(output))
    check_scheduler(scheduler)
    return output


def shares(output: SchedulerOutput) -> dict[str, int]:
    """How many tokens each request was given, in scheduling order."""
    return {share.request_id: len(share.token_ids) for share in output.scheduled}


def names(requests) -> list[str]:
    return [request.request_id for request in requests]


def check_scheduler(scheduler: Scheduler) -> None:
    """The invariants, its block manager's included; after every step."""
    scheduler.block_manager.check()
    queued = [*scheduler.running, *scheduler.waiting]
    assert sorted(r.request_id for r in queued) == sorted(scheduler.requests), "a request is in no queue or in two"
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda r: r.sort_key)
    for request in queued:
        num_blocks = len(scheduler.block_manager.block_table(request.request_id))
        num_written = request.num_computed_tokens - request.num_in_flight_tokens
        assert 0 <= num_written < request.num_tokens < request.max_num_tokens
        assert num_blocks >= cdiv(request.num_computed_tokens, scheduler.block_manager.block_size)
        assert (request.status is RequestStatus.RUNNING) == (request in scheduler.running)
        assert request in scheduler.running or request.num_computed_tokens == num_blocks == 0
