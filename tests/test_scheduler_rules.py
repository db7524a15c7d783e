"""Lesson: vLLM V1's scheduler, a test for each rule by its number (17, 28 and 29 are about what is left out here)."""

import subprocess
import sys

import pytest
from helpers_scheduler import answer, check_scheduler, make_request, make_scheduler, names, shares, step

from nanoserve.request import RequestStatus
from nanoserve.scheduler import Scheduler


def test_the_scheduler_imports_no_torch():
    code = "import sys, nanoserve.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_rule_01_no_phases_only_what_is_computed_catching_up_with_what_is_known():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    outputs = [step(scheduler, make_request("A", 10))] + [step(scheduler) for _ in range(4)]
    given = [(output.scheduled[0].num_computed_tokens, len(output.scheduled[0].token_ids)) for output in outputs]
    assert given == [(0, 4), (4, 4), (8, 2), (10, 1), (11, 1)]


def test_rule_02_running_requests_first_in_list_order_then_waiting_ones():
    scheduler = make_scheduler(max_num_batched_tokens=6, policy="priority")
    step(scheduler, make_request("A", 3, priority=2), make_request("B", 3, priority=1, arrival_time=1))
    assert names(scheduler.running) == ["B", "A"]
    output = step(scheduler, make_request("C", 10, priority=0, arrival_time=2))
    assert list(shares(output).items()) == [("B", 1), ("A", 1), ("C", 4)]


def test_rule_03_a_share_is_what_is_missing_then_the_threshold_then_the_budget_then_the_room():
    scheduler = make_scheduler(max_num_batched_tokens=8, long_prefill_token_threshold=5, max_model_len=10)
    output = step(scheduler, make_request("A", 2), make_request("B", 8), make_request("C", 3))
    assert shares(output) == {"A": 2, "B": 5, "C": 1}

    scheduler = make_scheduler(max_model_len=10)
    step(scheduler, make_request("A", 6))
    scheduler.update_draft_token_ids({"A": [1, 2, 3, 4, 5]})
    assert shares(scheduler.schedule()) == {"A": 3}  # positions 6, 7 and 8; a token for position 9 is never computed


def test_rule_04_the_threshold_caps_running_and_waiting_requests_but_not_an_only_one():
    scheduler = make_scheduler(long_prefill_token_threshold=3, max_num_batched_tokens=10)
    assert shares(step(scheduler, make_request("A", 30))) == {"A": 10}
    assert shares(step(scheduler, make_request("B", 5))) == {"A": 3, "B": 3}
    scheduler.abort_request("A")
    scheduler.add_request(make_request("C", 3))  # as long as the threshold: whole
    assert shares(step(scheduler)) == {"B": 2, "C": 3}


def test_rule_05_a_share_of_zero_continues_to_the_next_request():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request("A", 2))
    scheduler.add_request(make_request("B", 9))
    assert shares(scheduler.schedule()) == {"A": 2, "B": 2}
    assert shares(scheduler.schedule()) == {"B": 4}  # A's token is not sampled yet: nothing to do for A


def test_rule_06_preempt_until_it_fits():
    scheduler = make_scheduler(num_blocks=5)
    step(scheduler, make_request("A", 8), make_request("B", 1))
    step(scheduler, make_request("C", 4))
    assert [scheduler.block_manager.num_free_blocks, *names(scheduler.running)] == [0, "A", "B", "C"]
    scheduler.update_draft_token_ids({"A": [1] * 8})  # two more blocks, and the others hold one each
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"B", "C"} and shares(output) == {"A": 9}


def test_rule_06_the_running_loop_ends_when_a_request_was_its_own_victim():
    scheduler = make_scheduler(num_blocks=3, policy="priority")
    step(scheduler, make_request("A", 4, priority=1))
    step(scheduler, make_request("B", 1, priority=0))
    scheduler.update_draft_token_ids({"A": [1, 2, 3, 4]})
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"A"} and not output.scheduled and names(scheduler.running) == ["B"]


@pytest.mark.parametrize("policy, victim", [("fcfs", "C"), ("priority", "B")])
def test_rule_07_the_victim_is_the_last_to_arrive_or_the_least_important(policy, victim):
    scheduler = make_scheduler(num_blocks=3, policy=policy)
    step(
        scheduler,
        make_request("A", 4, priority=0, arrival_time=1),
        make_request("B", 1, priority=2, arrival_time=3),
        make_request("C", 1, priority=2, arrival_time=2),
    )
    assert scheduler.schedule().preempted_req_ids == {victim}


def test_rule_08_a_victim_that_already_had_its_share_loses_it_and_its_drafts_and_gives_the_tokens_back():
    scheduler = make_scheduler(num_blocks=4, policy="priority", max_num_batched_tokens=8)
    step(scheduler, make_request("A", 2, priority=2))
    step(scheduler, make_request("B", 4, priority=0), make_request("C", 2, priority=1))
    scheduler.update_draft_token_ids({"A": [1, 1, 1, 1], "C": [1, 1, 1, 1, 1]})
    output = scheduler.schedule()  # A takes the last free block for 5 tokens, B needs one
    assert output.preempted_req_ids == {"A"} and shares(output) == {"B": 1, "C": 6}
    assert scheduler.waiting[0].spec_token_ids == []


def test_rule_09_preemption_frees_all_blocks_and_keeps_the_outputs():
    scheduler = make_scheduler(num_blocks=2)
    step(scheduler, make_request("A", 3), make_request("B", 3))
    step(scheduler)
    scheduler.add_request(make_request("C", 1))
    scheduler.update_draft_token_ids({"B": [1, 2, 3]})
    victim = scheduler.requests["B"]
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"B"} and shares(output) == {"A": 1}
    assert victim.status is RequestStatus.PREEMPTED
    assert (victim.num_computed_tokens, victim.num_preemptions, victim.spec_token_ids) == (0, 1, [])
    assert victim.output_token_ids == [7, 7] and scheduler.block_manager.block_table("B") == []
    assert names(scheduler.waiting) == ["B", "C"]  # ahead of those who never ran


def test_rule_10_nobody_is_admitted_in_a_step_that_preempted():
    scheduler = make_scheduler(num_blocks=3)
    step(scheduler, make_request("A", 4), make_request("B", 8))
    scheduler.add_request(make_request("C", 1))
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"B"} and shares(output) == {"A": 1}
    assert scheduler.block_manager.num_free_blocks == 1  # room for C, but C came after B, and B not now


def test_rule_11_the_head_of_the_waiting_line_is_not_overtaken():
    scheduler = make_scheduler(num_blocks=4)
    step(scheduler, make_request("A", 5))
    scheduler.add_request(make_request("large", 9))
    scheduler.add_request(make_request("small", 1))
    assert shares(step(scheduler)) == {"A": 1} and names(scheduler.waiting) == ["large", "small"]
    scheduler.abort_request("A")
    assert shares(step(scheduler)) == {"large": 9, "small": 1}


def test_rule_11_admission_stops_at_max_num_seqs_and_at_the_end_of_the_budget():
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=5)
    assert shares(step(scheduler, *(make_request(name, 5) for name in "ABC"))) == {"A": 5}
    assert shares(step(scheduler)) == {"A": 1, "B": 4}
    assert shares(step(scheduler)) == {"A": 1, "B": 1} and names(scheduler.waiting) == ["C"]


def test_rule_12_a_resumed_request_looks_up_its_prompt_and_its_outputs():
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    step(scheduler, make_request("A", 4, max_tokens=3), make_request("B", 3))
    step(scheduler)
    assert step(scheduler).preempted_req_ids == {"B"}  # it needed a third block in the step in which A came to its end
    [share] = step(scheduler).scheduled
    assert (share.request_id, share.num_computed_tokens, share.token_ids) == ("B", 4, [7])
    assert scheduler.requests["B"].num_cached_tokens == 0  # counts the first admission's prompt


def test_rule_13_a_full_hit_computes_the_last_block_again():
    scheduler = make_scheduler()
    step(scheduler, make_request("A", [1, 2, 3, 4, 5, 6, 7, 8]))
    output = step(scheduler, make_request("same", [1, 2, 3, 4, 5, 6, 7, 8]), make_request("longer", range(1, 10)))
    assert shares(output) == {"A": 1, "same": 4, "longer": 1}
    assert scheduler.requests["same"].num_cached_tokens == 4 and scheduler.requests["longer"].num_cached_tokens == 8


def test_rule_14_equal_prompts_share_blocks_within_one_step():
    scheduler = make_scheduler()
    output = step(scheduler, make_request("A", [1, 2, 3, 4, 5]), make_request("B", [1, 2, 3, 4, 6]))
    first, second = output.scheduled
    assert shares(output) == {"A": 5, "B": 1} and first.block_ids[0] == second.block_ids[0]


def test_rule_14_drafts_are_registered_when_they_were_right():
    scheduler = make_scheduler()
    step(scheduler, make_request("A", [1, 2]))
    scheduler.update_draft_token_ids({"A": [3, 4]})
    output = scheduler.schedule()
    same = make_request("B", [1, 2, 7, 3, 4])
    assert output.scheduled[0].token_ids == [7, 3, 4] and not scheduler.block_manager.get_computed_blocks(same)
    scheduler.update_from_output(output, [[3, 4, 5]])
    assert shares(step(scheduler, same)) == {"A": 1, "B": 1}


def test_rule_15_hit_blocks_that_nobody_holds_are_taken_from_the_free_ones():
    scheduler = make_scheduler(num_blocks=3)
    step(scheduler, make_request("A", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1))  # both its blocks are free, and cached
    step(scheduler, make_request("B", 1))
    blocked = step(scheduler, make_request("C", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert shares(blocked) == {"B": 1}  # C would need two hits and a new block: three of two free ones
    scheduler.abort_request("B")
    output = step(scheduler)
    assert shares(output) == {"C": 1} and output.num_free_blocks == 0


def test_rule_16_a_waiting_request_is_admitted_only_if_all_it_knows_fits():
    scheduler = make_scheduler(num_blocks=5, long_prefill_token_threshold=4)
    step(scheduler, make_request("A", 12))
    output = step(scheduler, make_request("B", 9))
    assert shares(output) == {"A": 1} and output.num_free_blocks == 1  # room for B's first chunk, not for all of B
    scheduler.abort_request("A")
    assert shares(step(scheduler)) == {"B": 9}


def test_rule_16_a_running_request_takes_what_it_needs_now():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=6)
    step(scheduler, make_request("A", 4), make_request("B", 12))
    output = step(scheduler)
    assert shares(output) == {"A": 1, "B": 5} and output.num_free_blocks == 0  # though B will lack a block


def test_rule_18_the_tail_of_a_finished_request_is_reused_before_its_head():
    scheduler = make_scheduler(num_blocks=3)
    output = step(scheduler, make_request("A", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1))
    head, middle, tail = output.scheduled[0].block_ids
    assert step(scheduler, make_request("B", 1)).scheduled[0].block_ids == [tail]  # was not full: nothing to reuse
    output = step(scheduler, make_request("C", 1))
    assert output.scheduled[1].block_ids == [middle]
    scheduler.abort_request("B")
    output = step(scheduler, make_request("D", [1, 2, 3, 4, 5]))
    assert output.scheduled[1].block_ids[0] == head and scheduler.requests["D"].num_cached_tokens == 4


def test_rule_19_a_free_block_can_be_hit_until_it_is_handed_out():
    scheduler = make_scheduler(num_blocks=2)
    step(scheduler, make_request("A", [1, 2, 3, 4], max_tokens=1))
    assert shares(step(scheduler, make_request("B", [1, 2, 3, 4, 5], max_tokens=1))) == {"B": 1}
    step(scheduler, make_request("C", 8, max_tokens=1))
    assert shares(step(scheduler, make_request("D", [1, 2, 3, 4, 5]))) == {"D": 5}


def test_rule_19_equal_blocks_are_not_merged():
    scheduler = make_scheduler()
    step(scheduler, make_request("A", [1, 2, 3, 4]))
    output = step(
        scheduler, make_request("B", [1, 2, 3, 4])
    )  # a full hit is no hit: computed again, in a block of its own
    a, b = (share.block_ids[0] for share in output.scheduled)
    assert a != b
    scheduler.abort_request("A")
    assert step(scheduler, make_request("C", [1, 2, 3, 4, 5])).scheduled[1].block_ids[0] == a


def test_rule_20_a_block_is_found_only_behind_the_same_prefix():
    scheduler = make_scheduler()
    step(scheduler, make_request("A", [1, 1, 1, 1, 2, 2, 2, 2, 3]))
    output = step(scheduler, make_request("B", [2, 2, 2, 2, 3]), make_request("C", [9, 9, 9, 9, 2, 2, 2, 2, 3]))
    assert shares(output) == {"A": 1, "B": 5, "C": 9}


def test_rule_20_hashes_grow_with_the_outputs():
    scheduler = make_scheduler()
    step(scheduler, make_request("A", [1, 2, 3]))
    step(scheduler)
    assert shares(step(scheduler, make_request("B", [1, 2, 3, 7, 7, 8]))) == {"A": 1, "B": 2}


def test_rule_21_tokens_count_as_computed_when_they_are_scheduled():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request("A", 10))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.requests["A"].num_computed_tokens == 8
    assert (first.scheduled[0].num_computed_tokens, second.scheduled[0].num_computed_tokens) == (0, 4)


def test_rule_22_rejected_drafts_roll_back_what_is_computed():
    scheduler = make_scheduler()
    step(scheduler, make_request("A", 4))
    scheduler.update_draft_token_ids({"A": [1, 2, 3]})
    output = scheduler.schedule()
    assert output.scheduled[0].num_spec_tokens == 3 and output.scheduled[0].token_ids == [7, 1, 2, 3]
    scheduler.update_from_output(output, [[1, 9]])  # the first was right
    request = scheduler.requests["A"]
    assert (request.output_token_ids, request.num_computed_tokens) == ([7, 1, 9], 6)
    assert scheduler.schedule().scheduled[0].token_ids == [9]


def test_rule_22_tokens_are_appended_one_by_one_until_one_ends_the_request():
    scheduler = make_scheduler(eos_token_ids={2})
    step(scheduler, make_request("A", 4), make_request("B", 4))
    scheduler.update_draft_token_ids({"A": [1, 2, 3]})
    [finished] = scheduler.update_from_output(scheduler.schedule(), [[1, 2, 3, 4], [5]])
    assert finished.output_token_ids == [7, 1, 2] and finished.status is RequestStatus.FINISHED_STOPPED
    assert names(scheduler.running) == ["B"] and scheduler.block_manager.block_table("A") == []


@pytest.mark.parametrize(
    "token_id, params, status, stop_reason",
    [
        (2, {}, RequestStatus.FINISHED_STOPPED, None),
        (2, {"stop_token_ids": [2]}, RequestStatus.FINISHED_STOPPED, None),
        (2, {"stop_token_ids": [2], "ignore_eos": True}, RequestStatus.FINISHED_STOPPED, 2),
        (3, {"stop_token_ids": [3]}, RequestStatus.FINISHED_STOPPED, 3),
        (2, {"ignore_eos": True}, RequestStatus.FINISHED_LENGTH_CAPPED, None),
        (4, {}, RequestStatus.FINISHED_LENGTH_CAPPED, None),
    ],
)
def test_rule_23_eos_then_stop_ids_then_lengths(token_id, params, status, stop_reason):
    scheduler = make_scheduler(eos_token_ids={2})
    scheduler.add_request(make_request("A", 3, max_tokens=1, **params))
    [request] = scheduler.update_from_output(scheduler.schedule(), [[token_id]])
    assert (request.status, request.stop_reason) == (status, stop_reason)


@pytest.mark.parametrize("max_tokens, expected", [(1, 1), (2, 2), (3, 3), (None, 6), (60, 6)])
def test_rule_23_exactly_max_tokens_or_up_to_max_model_len(max_tokens, expected):
    scheduler = make_scheduler(max_model_len=10)
    request = make_request("A", 4, max_tokens=max_tokens, ignore_eos=True)
    scheduler.add_request(request)
    while scheduler.has_unfinished_requests:
        step(scheduler)
    assert len(request.output_token_ids) == expected and request.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_rule_24_a_share_that_does_not_reach_the_end_samples_nothing():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request("A", 8))
    last_chunks = [step(scheduler).scheduled[0].is_last_chunk for _ in range(3)]
    assert last_chunks == [False, True, True] and len(scheduler.requests["A"].output_token_ids) == 2


def test_rule_25_finished_ids_travel_with_the_next_output_once():
    scheduler = make_scheduler()
    outputs = [
        step(scheduler, make_request("A", 3, max_tokens=1), make_request("B", 3)),
        step(scheduler),
        step(scheduler),
    ]
    assert [output.finished_req_ids for output in outputs] == [set(), {"A"}, set()]
    scheduler.abort_request("B")
    assert scheduler.schedule().finished_req_ids == {"B"}


def test_rule_26_equals_go_by_priority_then_arrival_time_then_id():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    for name, priority, arrival_time in [("d", 1, 0), ("c", 0, 2), ("b", 0, 1), ("a", 0, 2)]:
        scheduler.add_request(make_request(name, 3, priority=priority, arrival_time=arrival_time))
    assert names(scheduler.waiting) == ["b", "a", "c", "d"]


def test_rule_26_first_come_first_served_goes_by_the_order_of_adding_alone():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, arrival_time in [("c", 3), ("a", 9), ("b", 1)]:
        scheduler.add_request(make_request(name, 3, priority=-arrival_time, arrival_time=arrival_time))
    assert names(scheduler.waiting) == ["c", "a", "b"]


def test_rule_27_whoever_is_admitted_can_finish_alone():
    scheduler = make_scheduler(num_blocks=3, max_model_len=13)
    request = make_request("A", 12, max_tokens=1)
    assert shares(step(scheduler, request)) == {"A": 12} and request.status.is_finished
    scheduler = make_scheduler(num_blocks=3, max_model_len=14)
    with pytest.raises(ValueError, match="cache.s 3, got 4"):
        scheduler.add_request(make_request("B", 12, max_tokens=2))


def refused(scheduler: Scheduler, request, *named: str) -> None:
    before = (dict(scheduler.requests), list(scheduler.waiting), list(scheduler.running))
    with pytest.raises(ValueError) as error:
        scheduler.add_request(request)
    assert all(name in str(error.value) for name in named), error.value
    assert (scheduler.requests, list(scheduler.waiting), scheduler.running) == before
    check_scheduler(scheduler)


def test_what_could_never_finish_is_refused_and_nothing_is_queued():
    scheduler = make_scheduler(num_blocks=4, max_model_len=30)
    scheduler.add_request(make_request("A", 4, max_tokens=4))
    refused(scheduler, make_request("A", 3), "'A'")
    refused(scheduler, make_request("empty", []), "empty", "0")
    refused(scheduler, make_request("long", 31), "long", "30", "31")
    refused(scheduler, make_request("just too long", 30), "max_model_len=30")
    refused(scheduler, make_request("large", 14, max_tokens=4), "large", "5", "4")
    assert shares(step(scheduler)) == {"A": 4}  # requests around them go on
    refused(scheduler, make_request("A", 3), "'A'")  # running now


def aborted(scheduler: Scheduler, request, free: int) -> bool:
    scheduler.abort_request(request.request_id)
    check_scheduler(scheduler)
    return (
        request.status is RequestStatus.FINISHED_ABORTED
        and request.request_id not in scheduler.requests
        and scheduler.block_manager.num_free_blocks == free
    )


def test_abort_while_waiting():
    scheduler = make_scheduler(num_blocks=4)
    request = make_request("A", 4)
    scheduler.add_request(request)
    assert aborted(scheduler, request, free=4) and not step(scheduler).scheduled


def test_abort_in_the_middle_of_a_prompt():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=6)
    request = make_request("A", 10)
    step(scheduler, request)
    assert aborted(scheduler, request, free=4) and not step(scheduler).scheduled


def test_abort_between_schedule_and_update_drops_the_late_token():
    scheduler = make_scheduler(num_blocks=4)
    request, other = make_request("A", 4), make_request("B", 4)
    scheduler.add_request(request)
    scheduler.add_request(other)
    output = scheduler.schedule()
    assert aborted(scheduler, request, free=3)
    assert scheduler.update_from_output(output, answer(output)) == []
    assert request.output_token_ids == [] and other.output_token_ids == [7]
    check_scheduler(scheduler)


def test_a_late_token_is_not_given_to_the_next_request_of_that_name():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("A", 4))
    output = scheduler.schedule()
    scheduler.abort_request("A")
    namesake = make_request("A", 4)
    scheduler.add_request(namesake)
    scheduler.update_from_output(output, answer(output))
    assert namesake.output_token_ids == [] and names(scheduler.waiting) == ["A"]
    assert shares(step(scheduler)) == {"A": 4} and namesake.output_token_ids == [7]


def test_abort_after_preemption():
    scheduler = make_scheduler(num_blocks=2)
    request = make_request("B", 4)
    step(scheduler, make_request("A", 4), request)
    assert step(scheduler).preempted_req_ids == {"B"}
    assert aborted(scheduler, request, free=0) and not scheduler.waiting


def test_abort_of_a_finished_or_unknown_request_changes_nothing_nor_does_a_second_abort():
    scheduler = make_scheduler(num_blocks=4)
    finished, running = make_request("A", 4, max_tokens=1), make_request("B", 4)
    step(scheduler, finished, running)
    for request_id in ("A", "nobody"):
        scheduler.abort_request(request_id)
    assert finished.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert aborted(scheduler, running, free=4) and aborted(scheduler, running, free=4)
    assert scheduler.schedule().finished_req_ids == {"A", "B"}


def test_a_failed_step_puts_its_requests_back_and_leaves_the_others_alone():
    scheduler = make_scheduler(max_num_batched_tokens=5)
    step(scheduler, make_request("done", 2, max_tokens=1), make_request("A", 3))
    step(scheduler, make_request("B", 6))
    scheduler.add_request(make_request("C", 3))
    before = {name: request.token_ids[:] for name, request in scheduler.requests.items()}
    scheduler.abort_request("nobody")
    output = scheduler.schedule()
    assert shares(output) == {"A": 1, "B": 2, "C": 2}
    scheduler.requeue_running()
    check_scheduler(scheduler)
    assert names(scheduler.waiting) == ["A", "B", "C"] and not scheduler.running
    assert {name: request.token_ids for name, request in scheduler.requests.items()} == before
    assert scheduler.block_manager.num_free_blocks == 100
    assert scheduler.schedule().preempted_req_ids == {"A", "B", "C"}


def test_what_a_failed_step_had_announced_is_announced_again():
    scheduler = make_scheduler()
    step(scheduler, make_request("done", 2, max_tokens=1), make_request("A", 3))
    output = scheduler.schedule()
    scheduler.requeue_running()
    assert output.finished_req_ids == scheduler.schedule().finished_req_ids == {"done"}


def test_a_step_whose_results_were_unusable_can_be_requeued():
    scheduler = make_scheduler(num_blocks=8)
    step(scheduler, make_request("A", 3), make_request("B", 3))
    output = scheduler.schedule()
    with pytest.raises(ValueError):
        scheduler.update_from_output(output, [[7]])  # one answer for two requests
    scheduler.requeue_running()
    check_scheduler(scheduler)
    assert names(scheduler.waiting) == ["A", "B"] and scheduler.block_manager.num_free_blocks == 8


def test_a_request_aborted_before_its_step_failed_stays_aborted():
    scheduler = make_scheduler(num_blocks=4)
    request = make_request("A", 4)
    scheduler.add_request(request)
    scheduler.schedule()
    scheduler.abort_request("A")
    scheduler.requeue_running()
    assert aborted(scheduler, request, free=4) and not scheduler.has_unfinished_requests


def test_a_block_promised_to_a_withdrawn_victim_is_not_found():
    """vLLM 0.32.0 resumes A at position 14 here, with positions 12 and 13 never written: see BlockManager."""
    scheduler = make_scheduler(
        num_blocks=10, block_size=2, policy="priority", max_num_batched_tokens=8, long_prefill_token_threshold=4
    )
    step(scheduler, make_request("A", 20, max_tokens=1, priority=2))
    step(scheduler, make_request("B", 4, max_tokens=2, priority=0))
    output = step(scheduler)  # A is given positions 12 to 15; then B needs a block, and A must go
    assert output.preempted_req_ids == {"A"} and shares(output) == {"B": 1}
    [share] = step(scheduler).scheduled
    assert (share.request_id, share.num_computed_tokens) == ("A", 12)


@pytest.mark.parametrize("events", [["abort"], ["failure"], ["abort", "failure"], ["abort", "update"]])
def test_a_block_promised_to_a_step_that_has_not_run_is_not_found(events):
    scheduler = make_scheduler()
    step(scheduler, make_request("A", [1, 2, 3, 4, 5]))
    step(scheduler)
    step(scheduler)
    output = scheduler.schedule()
    same = make_request("same", [1, 2, 3, 4, 5, 7, 7, 7, 8])
    assert len(scheduler.block_manager.get_computed_blocks(same)) == 2  # promised: who is admitted now may share it
    for event in events:
        if event == "abort":
            scheduler.abort_request("A")
        elif event == "failure":
            scheduler.requeue_running()
        else:
            scheduler.update_from_output(output, answer(output))
        check_scheduler(scheduler)
    # After a failure nothing in the cache is relied on.
    assert len(scheduler.block_manager.get_computed_blocks(same)) == (0 if "failure" in events else 1)
