"""Who computed what in which step, from the scheduler's outputs alone (the figures of chapter 2.2, sections 2 and 3).

This module decides what counts as generating, idle and empty. The engine's caller records its steps here.
"""

from collections import Counter
from enum import Enum
from itertools import groupby
from typing import Any

from nanoserve.scheduler import SchedulerOutput


class Cell(Enum):
    """What a request does in one step: name, colour and hatch in the figures."""
    PREFILL = "prefill chunk", "#f2a33a", ""  # of a prompt, or of what a preemption lost
    DECODE = "decode", "#4cab6d", ""
    IDLE = "idle after finishing", "#a9d8b8", "////"  # keeps its slot until its static batch has ended
    STALLED = "running without budget", "#8d99a6", ""
    WAITING = "waiting", "#dfe3e8", ""
    PREEMPTED = "preempted", "#d64545", ""


class Timeline:
    """Slots and requests over steps; a slot is one of the `num_slots` (max_num_seqs) requests that may run at once.
    With `static` a request that has finished, which the next output tells, keeps its slot until its whole batch has.
    """
    def __init__(self, num_slots: int, static: bool = False):
        self.static = static
        self.steps: list[dict[str, Cell]] = []  # what each request does, by id; who is not there is absent
        self.slots: list[list[tuple[str | None, Cell | None]]] = []  # who holds each slot, and what it does
        self.num_tokens: list[int] = []
        self.num_used_blocks: list[int] = []
        self.num_blocks = self.num_preemptions = 0
        self._holders: list[str | None] = [None] * num_slots
        self._state: dict[Any, Cell] = {}  # WAITING, PREEMPTED or IDLE; of running requests, what its next share is

    def arrive(self, request_id: str) -> None:
        """The request waits from the next step on. Optional: no output says it."""
        self._state[request_id] = Cell.WAITING

    def record(self, output: SchedulerOutput) -> None:
        """Add `llm.last_output`, from an idle engine's first step on. Raises ValueError if there are too few slots."""
        running, holders = (Cell.PREFILL, Cell.DECODE), self._holders
        self._state |= dict.fromkeys(output.preempted_req_ids, Cell.PREEMPTED)
        self._state |= dict.fromkeys(output.finished_req_ids, Cell.IDLE)
        idle = holders if self.static and any(cell in running for cell in self._state.values()) else ()
        self._state = state = {n: cell for n, cell in self._state.items() if cell is not Cell.IDLE or n in idle}
        cells = {name: Cell.STALLED if cell in running else cell for name, cell in state.items()}
        holders[:] = (name if cells.get(name) in (Cell.STALLED, Cell.IDLE) else None for name in holders)
        for share in output.scheduled:
            name = share.request_id
            if name not in holders:
                holders[holders.index(None)] = name
            cells[name] = Cell.DECODE if state.get(name) is Cell.DECODE else Cell.PREFILL
            state[name] = Cell.DECODE if share.is_last_chunk else Cell.PREFILL
        if not self.steps:  # everything held is in this output
            self.num_blocks = len({b for share in output.scheduled for b in share.block_ids}) + output.num_free_blocks
        self.num_preemptions += len(output.preempted_req_ids)
        self.num_used_blocks.append(self.num_blocks - output.num_free_blocks)
        self.num_tokens.append(sum(len(share.token_ids) for share in output.scheduled))
        self.steps.append(cells)
        self.slots.append([(name, cells.get(name)) for name in holders])

    def slot_steps(self) -> Counter:
        """How many slot-steps went to each Cell; None: empty."""
        return Counter(cell for row in self.slots for _, cell in row)

    def plot(self, path: str) -> None:
        """Draw slots, requests, and the use of token budget and K/V cache over steps. Needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 10), layout="constrained")
        slots, requests, tokens, blocks = figure.subplots(4, sharex=True, height_ratios=(2, 3, 1, 1))
        self.draw_slots(slots)
        names = dict.fromkeys(name for cells in self.steps for name in cells)
        _draw_rows(requests, "request", [[(name, cells.get(name)) for cells in self.steps] for name in names])
        tokens.stairs(self.num_tokens, fill=True, color="#6f86a8")
        tokens.set(ylabel="tokens per step", yscale="log")
        blocks.stairs(self.num_used_blocks, fill=True, color="#6f86a8")
        blocks.set(xlabel="step", ylabel=f"K/V blocks in use,\nof {self.num_blocks}", xlim=(0, len(self.steps)))
        figure.savefig(path, dpi=90)

    def draw_slots(self, axes: Any) -> None:
        _draw_rows(axes, "slot", list(zip(*self.slots, strict=True)))


def _draw_rows(axes: Any, label: str, rows: list) -> None:
    """A row is a (name, Cell or None) for each step: one bar for each run of equal ones, and a legend of those seen."""
    runs = [(y, list(run)) for y, row in enumerate(rows) for _, run in groupby(range(len(row)), row.__getitem__)]
    for cell in Cell:
        mine = [(y, len(run), run[0]) for y, run in runs if rows[y][run[0]][1] is cell]
        if mine:
            (y, width, left), (name, color, hatch) = zip(*mine, strict=True), cell.value
            axes.barh(y, width, left=left, label=name, color=color, hatch=hatch, edgecolor="white", linewidth=0.3)
    axes.set(ylabel=label, ylim=(len(rows) - 0.5, -0.5), yticks=range(0, len(rows), len(rows) // 10 + 1))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(Cell), frameon=False)
