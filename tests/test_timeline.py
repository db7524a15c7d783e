"""Timelines worked out by hand: who holds which slot, what counts as generating, idle and empty, and the pictures."""

import pytest
from helpers_scheduler import make_request, make_scheduler, step

from nanoserve.request import SamplingParams
from nanoserve.scheduler import ScheduledRequest, Scheduler, SchedulerOutput, StaticBatchScheduler
from timeline import Cell, Timeline

LETTERS = {
    Cell.PREFILL: "P", Cell.DECODE: "D", Cell.IDLE: "i", Cell.STALLED: "s", Cell.WAITING: "w", Cell.PREEMPTED: "x",
    None: ".",
}  # fmt: skip


def output(shares, finished=(), preempted=(), num_free_blocks=0):
    """A step's output by hand; a share is (name, number of tokens, reaches its end?[, block ids])."""
    scheduled = [
        ScheduledRequest(name, [7] * n, 0, list(*blocks), 0, is_last, SamplingParams())
        for name, n, is_last, *blocks in shares
    ]
    return SchedulerOutput(scheduled, set(preempted), set(finished), num_free_blocks, 0)


def record(timeline, *outputs):
    for each in outputs:
        timeline.record(each)
    return timeline


def slots(timeline):
    """A string for each slot: its holder and what that does, step by step."""
    return ["".join((name or ".") + LETTERS[cell] for name, cell in row) for row in zip(*timeline.slots, strict=True)]


def requests(timeline):
    names = sorted({name for cells in timeline.steps for name in cells})
    return {name: "".join(LETTERS[cells.get(name)] for cells in timeline.steps) for name in names}


def run(scheduler, timeline, lengths, prompt=4):
    """Requests a, b, c ... that generate so many tokens, all there from the start, run to their end."""
    for name, n in zip("abcdefghijklmnop", lengths, strict=False):
        scheduler.add_request(make_request(name, prompt, max_tokens=n))
        timeline.arrive(name)
    while scheduler.has_unfinished_requests:
        timeline.record(step(scheduler))
    return timeline


def make(scheduler_cls, num_slots, **options):
    limits = {"max_num_seqs": num_slots, "max_num_batched_tokens": 100, "max_model_len": 520} | options
    return scheduler_cls(make_scheduler(num_blocks=1200).block_manager, **limits)


def test_the_chapters_batch_wastes_exactly_78_75_percent_of_its_slot_steps():
    lengths = [500, 20, 30, 40, 50, 60, 70, 80]  # the seven others: 50 on average
    counts = run(make(StaticBatchScheduler, 8), Timeline(8, static=True), lengths).slot_steps()
    assert counts == {Cell.PREFILL: 8, Cell.DECODE: 842, Cell.IDLE: 3150} and counts.total() == 8 * 500
    assert counts[Cell.IDLE] / counts.total() == 0.7875
    counts = run(make(Scheduler, 8), Timeline(8), lengths).slot_steps()
    assert counts == {Cell.PREFILL: 8, Cell.DECODE: 842, None: 3150}


def test_static_slots_turn_idle_and_the_next_batch_starts_when_all_are():
    timeline = run(make(StaticBatchScheduler, 3), Timeline(3, static=True), [2, 4, 1, 2])
    assert slots(timeline) == ["aPaDaiaidPdD", "bPbDbDbD....", "cPcicici...."]
    assert requests(timeline) == {"a": "PDii..", "b": "PDDD..", "c": "Piii..", "d": "wwwwPD"}


def test_continuous_slots_go_to_the_next_request_at_once():
    timeline = run(make(Scheduler, 3), Timeline(3), [2, 4, 1, 2])
    assert slots(timeline) == ["aPaD....", "bPbDbDbD", "cPdPdD.."]
    assert requests(timeline) == {"a": "PD..", "b": "PDDD", "c": "P...", "d": "wPD."}
    assert timeline.slot_steps() == {Cell.PREFILL: 4, Cell.DECODE: 5, None: 3}


def test_chunks_of_a_prompt_are_prefill_until_one_reaches_the_end():
    timeline = run(make(Scheduler, 2, max_num_batched_tokens=3), Timeline(2), [2, 2], prompt=7)
    # a: 3 + 3 + 1 tokens, and b gets what is left of each step's three.
    assert requests(timeline) == {"a": "PPPD..", "b": "wwPPPD"}
    assert timeline.num_tokens == [3, 3, 3, 3, 3, 1]


def test_running_without_a_share_is_not_generating():
    timeline = Timeline(2)
    record(timeline, output([("a", 2, True), ("b", 2, True)]), output([("a", 1, True)]), output([("b", 1, True)]))
    assert requests(timeline) == {"a": "PDs", "b": "PsD"}
    assert timeline.slot_steps() == {Cell.PREFILL: 2, Cell.DECODE: 2, Cell.STALLED: 2}


def test_drafts_are_decodes_and_a_prompt_of_one_token_is_a_prefill():
    timeline = record(Timeline(1), output([("a", 1, True)]), output([("a", 4, True)]), output([("a", 1, True)]))
    assert requests(timeline) == {"a": "PDD"} and timeline.num_tokens == [1, 4, 1]


@pytest.mark.parametrize("static", [False, True])
def test_a_preempted_request_gives_its_slot_back_and_prefills_again(static):
    timeline = record(
        Timeline(2, static),
        output([("a", 2, True), ("b", 2, True)]),
        output([("a", 1, True)], preempted=["b"]),
        output([("a", 1, True)]),
        output([("b", 2, False)], finished=["a"]),
        output([("b", 2, True)]),
        output([("b", 1, True)]),
    )
    assert requests(timeline) == {"a": "PDD...", "b": "PxxPPD"}
    assert slots(timeline) == ["aPaDaDbPbPbD", "bP.........."]
    assert timeline.num_preemptions == 1


@pytest.mark.parametrize("static", [False, True])
def test_who_leaves_from_the_queue_leaves_the_picture(static):
    timeline = Timeline(1, static)
    timeline.arrive("a")
    timeline.arrive("b")
    record(timeline, output([("a", 1, True)]), output([("a", 1, True)], finished=["b"]))  # b was aborted
    record(timeline, output([], preempted=["a"]), output([], finished=["a"]), output([]))
    assert requests(timeline) == {"a": "PDx..", "b": "w...."} and slots(timeline) == ["aPaD......"]


def test_a_name_can_come_back():
    timeline = record(Timeline(1), output([("a", 2, True)]), output([("a", 2, True)], finished=["a"]))
    assert requests(timeline) == {"a": "PP"}


def test_blocks_are_counted_from_the_first_output():
    timeline = record(
        Timeline(2),
        output([("a", 8, True, [0, 1]), ("b", 9, True, [0, 1, 2])], num_free_blocks=5),  # two of them shared
        output([("a", 1, True, [0, 1, 3])], num_free_blocks=4),
        output([("a", 1, True, [0, 1, 3])], finished=["b"], num_free_blocks=5),
    )
    assert timeline.num_blocks == 8 and timeline.num_used_blocks == [3, 4, 3]


def test_too_few_slots_raise():
    with pytest.raises(ValueError):
        record(Timeline(1), output([("a", 1, True), ("b", 1, True)]))


def test_what_is_counted_is_what_the_scheduler_did():
    """Under memory pressure, against the scheduler's own queues and counters."""
    scheduler, timeline = make_scheduler(num_blocks=9, max_num_seqs=4, max_num_batched_tokens=6), Timeline(4)
    todo = [make_request(str(i), 5 + i % 4, max_tokens=3 + 5 * (i % 3)) for i in range(12)]
    all_requests, num_tokens = todo[:], 0
    while todo or scheduler.has_unfinished_requests:
        for request in todo[:2]:
            scheduler.add_request(request)
            timeline.arrive(request.request_id)
        del todo[:2]
        each = scheduler.schedule()
        timeline.record(each)
        running = {request.request_id for request in scheduler.running}
        assert {name for name, _ in timeline.slots[-1]} - {None} == running
        queued = {name for name, cell in timeline.steps[-1].items() if cell in (Cell.WAITING, Cell.PREEMPTED)}
        assert queued == {request.request_id for request in scheduler.waiting}
        assert timeline.num_used_blocks[-1] == 9 - scheduler.block_manager.num_free_blocks
        num_tokens += sum(len(share.token_ids) for share in each.scheduled)
        scheduler.update_from_output(each, [[7] if share.is_last_chunk else [] for share in each.scheduled])
    assert sum(timeline.num_tokens) == num_tokens
    assert timeline.num_preemptions == sum(request.num_preemptions for request in all_requests) > 0


# The figures


def test_the_plot_shows_slots_requests_budget_and_cache(figures, tmp_path):
    timeline = run(make(StaticBatchScheduler, 3), Timeline(3, static=True), [2, 4, 1, 2])
    timeline.plot(str(tmp_path / "timeline.png"))
    content = (tmp_path / "timeline.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) < 150_000
    (figure,) = figures
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["slot", "request", "tokens per step", "K/V blocks in use,\nof 1200"]
    assert figure.axes[-1].get_xlabel() == "step"
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes[:2]]
    assert legends[0] == ["prefill chunk", "decode", "idle after finishing"]
    assert legends[1] == [*legends[0], "waiting"]


def test_a_bar_lies_where_its_slot_was_idle(figures, tmp_path):
    run(make(StaticBatchScheduler, 3), Timeline(3, static=True), [2, 4, 1, 2]).plot(str(tmp_path / "timeline.png"))
    idle = [patch for patch in figures[0].axes[0].patches if patch.get_hatch()]
    bars = {(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in idle}
    assert bars == {(0, 2, 2), (2, 1, 3)}  # slot, from step, for so many steps
