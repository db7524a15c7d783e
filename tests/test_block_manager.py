"""Lesson: what PagedAttention's bookkeeping keeps true, whoever takes, shares and gives back blocks."""

import pickle
import random

import pytest
from helpers_scheduler import make_request

from nanoserve.block_manager import BlockManager
from nanoserve.request import Request


def compute(manager: BlockManager, request: Request, num_tokens: int | None = None) -> list[int] | None:
    """Admit a request and compute its first tokens, all by default; its new blocks, or None."""
    hits = manager.get_computed_blocks(request)
    covered = len(hits) * manager.block_size
    blocks = manager.allocate_slots(request, (num_tokens or request.num_tokens) - covered, hits)
    if blocks is not None:
        request.num_computed_tokens = num_tokens or request.num_tokens
    manager.check()
    return blocks


def free(manager: BlockManager, request: Request) -> None:
    manager.free(request)
    request.num_computed_tokens = 0
    manager.check()


def next_blocks(manager: BlockManager) -> list[int]:
    """The free blocks in the order in which they will be handed out; the manager is of no use afterwards."""
    return compute(manager, make_request("rest", manager.num_free_blocks * manager.block_size))


def hits(manager: BlockManager, *token_ids: int) -> list[int]:
    probe = make_request("probe", list(token_ids))
    blocks = manager.get_computed_blocks(probe)
    manager.free(probe)
    return blocks


def snapshot(manager: BlockManager) -> bytes:
    return pickle.dumps(vars(manager))


def test_a_block_is_for_every_block_size_tokens_begun():
    manager = BlockManager(num_blocks=8, block_size=4)
    request = make_request("A", 5)
    assert compute(manager, request) == [0, 1]
    for computed, new_blocks in [(6, []), (8, []), (9, [2])]:
        assert manager.allocate_slots(request, computed - request.num_computed_tokens) == new_blocks
        request.num_computed_tokens = computed
    assert manager.block_table("A") == [0, 1, 2] and manager.num_free_blocks == 5


def test_without_caching_the_last_block_freed_is_handed_out_first():
    manager = BlockManager(num_blocks=6, block_size=2, enable_prefix_caching=False)
    request = make_request("A", [1, 2, 3, 4, 5])
    assert compute(manager, request) == [0, 1, 2]
    free(manager, request)
    assert hits(manager, 1, 2, 3, 4, 5) == [] and next_blocks(manager) == [2, 1, 0, 3, 4, 5]


def test_blocks_without_a_hash_go_to_the_front_the_others_to_the_end_tail_first():
    manager = BlockManager(num_blocks=6, block_size=2)
    request = make_request("A", [1, 2, 3, 4, 5])
    assert compute(manager, request) == [0, 1, 2]
    free(manager, request)
    assert next_blocks(manager) == [2, 3, 4, 5, 1, 0]


def test_a_prefix_outlives_its_suffix():
    manager = BlockManager(num_blocks=3, block_size=2)
    request = make_request("A", [1, 2, 3, 4, 5, 6])
    compute(manager, request)
    free(manager, request)
    for kept in [[0, 1], [0], []]:
        compute(manager, make_request(f"takes one, {kept} stay", 1))
        assert hits(manager, 1, 2, 3, 4, 5, 6, 7) == kept


def test_a_revived_block_keeps_its_hash():
    manager = BlockManager(num_blocks=4, block_size=2)
    first, second = make_request("A", [1, 2, 3, 4]), make_request("B", [1, 2, 3, 4, 5])
    compute(manager, first)
    free(manager, first)
    assert compute(manager, second) == [2] and manager.block_table("B") == [0, 1, 2]
    assert hits(manager, 1, 2, 3, 4, 6) == [0, 1]
    free(manager, second)
    assert hits(manager, 1, 2, 3, 4, 6) == [0, 1] and manager.num_free_blocks == 4


def test_a_block_handed_out_anew_leaves_the_cache():
    manager = BlockManager(num_blocks=2, block_size=2)
    first, second = make_request("A", [1, 2, 3, 4]), make_request("B", [5, 6, 7, 8])
    compute(manager, first)
    free(manager, first)
    assert compute(manager, second) == [1, 0]
    assert hits(manager, 1, 2, 3, 4, 9) == [] and hits(manager, 5, 6, 7, 8, 9) == [1, 0]


def test_a_block_shared_by_two_is_free_when_both_have_left():
    manager = BlockManager(num_blocks=6, block_size=2)
    first, second = make_request("A", [1, 2, 3, 4, 5]), make_request("B", [1, 2, 3, 4, 6])
    compute(manager, first)
    assert compute(manager, second) == [3] and manager.num_free_blocks == 2
    free(manager, first)
    assert manager.num_free_blocks == 3 and manager.block_table("B") == [0, 1, 3]
    free(manager, second)
    assert manager.num_free_blocks == 6


def test_allocation_that_fails_changes_nothing():
    manager = BlockManager(num_blocks=4, block_size=2)
    cached, running = make_request("cached", [1, 2, 3, 4]), make_request("running", 4)
    compute(manager, cached)
    free(manager, cached)
    compute(manager, running)
    same = make_request("same", [1, 2, 3, 4, 5, 6])
    blocks = manager.get_computed_blocks(same)
    assert len(blocks) == 2 and manager.num_free_blocks == 2  # both are hits: no room for the third
    new = make_request("new", 5)
    assert manager.get_computed_blocks(new) == []
    before = snapshot(manager)
    assert manager.allocate_slots(same, 2, blocks) is None
    assert manager.allocate_slots(same, 1, [], full_sequence_must_fit=True) is None
    assert manager.allocate_slots(running, 5) is None
    assert manager.allocate_slots(new, 5) is None
    assert snapshot(manager) == before and manager.block_table("same") == []


def test_hits_that_somebody_holds_need_no_free_block():
    manager = BlockManager(num_blocks=4, block_size=2)
    compute(manager, make_request("A", [1, 2, 3, 4, 5]))
    assert compute(manager, make_request("B", [1, 2, 3, 4, 6])) == [3] and manager.num_free_blocks == 0


def test_room_for_all_known_tokens_is_asked_for_but_not_taken():
    manager = BlockManager(num_blocks=4, block_size=2)
    assert manager.allocate_slots(make_request("A", 8), 1, [], full_sequence_must_fit=True) == [0]
    assert manager.allocate_slots(make_request("B", 7), 1, [], full_sequence_must_fit=True) is None
    assert manager.allocate_slots(make_request("B", 7), 1) == [1]


def test_equal_blocks_are_not_merged_and_each_can_be_hit():
    manager = BlockManager(num_blocks=4, block_size=2)
    first, second = make_request("A", [1, 2]), make_request("B", [1, 2])
    assert compute(manager, first) == [0] and compute(manager, second) == [1]
    assert hits(manager, 1, 2, 3) == [0]
    free(manager, first)
    compute(manager, make_request("C", 6))  # takes all that is free, block 0 with it
    assert hits(manager, 1, 2, 3) == [1]


@pytest.mark.parametrize("token_ids", [[3, 4, 5, 6, 7], [1, 1, 3, 4, 5], [2, 1, 3, 4, 5], [1, 2, 3, 5, 5, 6, 7], [1]])
def test_a_block_is_hit_only_behind_the_same_prefix(token_ids):
    manager = BlockManager(num_blocks=8, block_size=2)
    compute(manager, make_request("A", [1, 2, 3, 4, 5, 6]))
    common = 1 if token_ids[:2] == [1, 2] else 0
    assert hits(manager, *token_ids) == [0, 1, 2][:common]


@pytest.mark.parametrize("length", range(1, 10))
def test_hits_leave_at_least_one_token_to_compute(length):
    manager = BlockManager(num_blocks=8, block_size=3)
    compute(manager, make_request("A", range(9)))
    assert len(hits(manager, *range(length))) == (length - 1) // 3


def test_only_full_blocks_of_known_tokens_are_registered():
    manager = BlockManager(num_blocks=8, block_size=4)
    request = make_request("A", [1, 2, 3])
    assert manager.allocate_slots(request, 5) == [0, 1]  # three known tokens, two drafts
    assert hits(manager, 1, 2, 3, 4, 5) == []
    request.token_ids.append(4)  # the first draft was right
    request.num_computed_tokens = 4
    manager.allocate_slots(request, 1)
    assert hits(manager, 1, 2, 3, 4, 5) == [0]


def test_a_promised_block_is_found_while_its_step_may_run_and_forgotten_when_it_is_taken_back():
    manager = BlockManager(num_blocks=8, block_size=2)
    request = make_request("A", [1, 2, 3, 4, 5, 6])
    compute(manager, request, 3)
    assert manager.allocate_slots(request, 3) == [2]
    assert hits(manager, 1, 2, 3, 4, 5, 6, 7) == [0, 1, 2]
    free(manager, request)  # withdrawn: of its blocks only the first was full and computed
    assert hits(manager, 1, 2, 3, 4, 5, 6, 7) == [0]
    assert next_blocks(manager)[:2] == [2, 1]  # nothing in them to keep


def test_tokens_in_flight_are_promised_not_computed():
    manager = BlockManager(num_blocks=8, block_size=2)
    request = make_request("A", [1, 2, 3, 4, 5, 6])
    compute(manager, request)
    request.num_in_flight_tokens = 3
    free(manager, request)
    assert hits(manager, 1, 2, 3, 4, 5, 6, 7) == [0]


def test_freeing_twice_or_what_holds_nothing_changes_nothing():
    manager = BlockManager(num_blocks=4, block_size=2)
    request = make_request("A", 3)
    compute(manager, request)
    free(manager, request)
    before = snapshot(manager)
    free(manager, request)
    free(manager, make_request("B", 3))
    assert snapshot(manager) == before and manager.num_free_blocks == 4


def test_a_block_table_handed_out_stays_as_it_was():
    manager, request = BlockManager(num_blocks=4, block_size=2), make_request("A", 7)
    manager.allocate_slots(request, 3)
    request.num_computed_tokens = 3
    before = manager.block_table("A")
    manager.allocate_slots(request, 2)
    assert before == [0, 1] and manager.block_table("A") == [0, 1, 2]
    manager.free(request)
    assert before == [0, 1] and manager.block_table("A") == []


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-3, 4)])
def test_an_empty_cache_is_refused(sizes):
    with pytest.raises(ValueError, match=str(min(sizes))):
        BlockManager(*sizes)


@pytest.mark.parametrize("caching", [True, False])
def test_blocks_are_free_or_in_a_table_always(caching):
    rng = random.Random(caching)
    manager = BlockManager(num_blocks=12, block_size=2, enable_prefix_caching=caching)
    held: list[Request] = []
    for number in range(1000):
        if held and rng.random() < 0.5:
            free(manager, held.pop(rng.randrange(len(held))))
        else:
            request = make_request(f"r{number}", [rng.randrange(2) for _ in range(rng.randint(1, 8))])
            if compute(manager, request) is not None:
                held.append(request)
        used = {block for request in held for block in manager.block_table(request.request_id)}
        assert manager.num_free_blocks + len(used) == 12
