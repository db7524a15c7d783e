"""One step in flight: the next one is scheduled while the device computes (vLLM v1/core/sched/async_scheduler.py).

A request whose next token is still being sampled is given a placeholder for it, so that the token after it can be
scheduled already. What that costs: an end by EOS, stop id or stop string is seen one step late, and the token computed
meanwhile is dropped; an end by length is known in advance. What it does not cost: blocks. The device runs its steps in
order, so whoever is handed a block that a step in flight still writes will write and read it after that step.

    moment                          num_tokens  placeholders  num_computed_tokens
    schedule() gives a prompt of 5       5            1               5
    schedule() gives it 1                5            2               6             its id is a placeholder, -1
    update_from_output(), first step     6            1               6
    schedule() gives it 1                6            2               7
"""

from nanoserve.request import Request
from nanoserve.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """A Scheduler that may be asked for one more step before update_from_output has seen the last one. A token sampled
    for a request that was preempted meanwhile is dropped and sampled again: its K/V is gone anyway.
    """
    def _num_known(self, request: Request) -> int:
        """With the tokens being sampled, but for the request's last, which is never computed."""
        return min(request.num_tokens + request.num_output_placeholders, request.max_num_tokens - 1)
