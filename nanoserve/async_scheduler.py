"""One step in flight: the next one is scheduled while the device computes (vLLM v1/core/sched/async_scheduler.py).
This module decides which tokens count as known before they are; it does not know how a step runs. A token still being
sampled counts, by a placeholder, so that the one after it can be scheduled. An end by EOS, stop id or stop string is
therefore seen one step late, and the token computed meanwhile dropped; an end by length is known in advance. It costs
no blocks: the device runs steps in order, so a block's next owner writes after this step.

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
    for a request that was preempted meanwhile is dropped and sampled again: its K/V is gone anyway."""
    def _num_known(self, request: Request) -> int:
        """With the tokens being sampled, but for the request's last, which is never computed."""
        return min(request.num_tokens + request.num_output_placeholders, request.max_num_tokens - 1)
