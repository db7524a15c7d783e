"""PagedAttention's bookkeeping: the KV cache as blocks (Kwon et al. 2023; chapter 2.2, section 5).
This module decides which block a token's K/V goes to, which blocks two requests may share, and which block goes next.
It holds numbers only: it does not know tensors, layers, or why a request wants blocks. A block is `block_size`
consecutive tokens of one request, whose block table names the block of each such run, so they need not be contiguous. A
full block has a hash over its tokens and all before them, by which others find it until it is handed out anew."""

from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile

from nanoserve.request import Request, require


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(slots=True)
class _Holding:
    """What one request holds."""
    blocks: list[int] = field(default_factory=list)  # its block table; replaced when it grows, never changed
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were asked for
    num_registered: int = 0  # how many of its blocks can be found by hash


class BlockManager:
    """Block tables, reference counts, the prefix cache and the free queue (vLLM v1/core/kv_cache_manager.py and
    block_pool.py). Every block can be used: there is no null block. Full blocks are findable from when they are
    allocated, as in vLLM, so that equal prompts share within one step. The deliberate difference from vLLM 0.32.0: if
    that step is taken back, `free` forgets the hash of every block beyond what was computed; vLLM keeps it."""
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        require(min(num_blocks, block_size) > 0, "num_blocks and block_size", "at least 1", (num_blocks, block_size))
        self.num_blocks, self.block_size, self.enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """Nobody holds a block, and nothing is found in any."""
        self._ref_counts = [0] * self.num_blocks
        self._block_hash: list[bytes | None] = [None] * self.num_blocks
        self._cached: dict[bytes, dict[int, None]] = {}  # hash -> the blocks that carry it, oldest first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))  # next to be handed out first
        self._held: defaultdict[str, _Holding] = defaultdict(_Holding)

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request holds, those that could still be hit included."""
        return len(self._free)

    def block_table(self, request_id: str) -> list[int]:
        """The ids of the blocks that hold the request's tokens, in order; not to be changed."""
        return self._held[request_id].blocks if request_id in self._held else []

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The longest run of blocks that already hold the request's first tokens, but never all of these: the last
        token must be computed, for its logits.
        >>> from nanoserve.request import SamplingParams
        >>> manager = BlockManager(num_blocks=8, block_size=2)
        >>> first = Request("first", [1, 2, 3, 4, 5], SamplingParams())
        >>> manager.allocate_slots(first, 5)
        [0, 1, 2]
        >>> manager.get_computed_blocks(Request("same", [1, 2, 3, 4, 5], SamplingParams()))
        [0, 1]
        >>> manager.get_computed_blocks(Request("shorter", [1, 2, 3, 4], SamplingParams()))
        [0]
        >>> manager.get_computed_blocks(Request("tail", [3, 4, 5], SamplingParams()))
        []
        """
        num_blocks = (request.num_tokens - 1) // self.block_size if self.enable_prefix_caching else 0
        found = takewhile(self._cached.__contains__, self._hashes(request, num_blocks)[:num_blocks])
        return [next(iter(self._cached[block_hash])) for block_hash in found]

    def allocate_slots(self, request: Request, num_new_tokens: int, computed_blocks: Sequence[int] = (),
                       full_sequence_must_fit: bool = False) -> list[int] | None:
        """Make room for `num_new_tokens` more tokens; the ids of the newly handed out blocks, or None: no room, nothing
        changed. `computed_blocks` are get_computed_blocks', for a request that holds nothing. `full_sequence_must_fit`:
        None also if there is no room for every known token, since none is admitted for its first chunk alone.
        >>> from nanoserve.request import SamplingParams
        >>> manager = BlockManager(num_blocks=3, block_size=4)
        >>> request = Request("r", range(5), SamplingParams())
        >>> manager.allocate_slots(request, 5), manager.num_free_blocks
        ([0, 1], 1)
        >>> request.num_computed_tokens = 5
        >>> manager.allocate_slots(request, 3), manager.allocate_slots(request, 8)
        ([], None)
        """
        size, holding = self.block_size, self._held[request.request_id]
        num_held = len(computed_blocks) + len(holding.blocks)
        end = request.num_computed_tokens + len(computed_blocks) * size + num_new_tokens
        new_blocks: list[int] = []
        if end > num_held * size or computed_blocks:
            num_wanted = cdiv(max(end, request.num_tokens) if full_sequence_must_fit else end, size)
            num_revived = sum(self._ref_counts[block] == 0 for block in computed_blocks)  # free until now
            if num_wanted - num_held + num_revived > len(self._free):
                return None
            for block in computed_blocks:
                self._free.pop(block, None)
                self._ref_counts[block] += 1
            new_blocks = [self._free.popitem(last=False)[0] for _ in range(cdiv(end, size) - num_held)]
            for block in new_blocks:  # what it held can no longer be found
                self._forget(block)
                self._ref_counts[block] = 1
            holding.blocks = [*holding.blocks, *computed_blocks, *new_blocks]
            holding.num_registered += len(computed_blocks)
        if self.enable_prefix_caching and end // size > holding.num_registered:  # what is full can be found
            for i in range(holding.num_registered, min(end, request.num_tokens) // size):
                block_hash = self._hashes(request, i + 1)[i]
                self._block_hash[holding.blocks[i]] = block_hash
                self._cached.setdefault(block_hash, {})[holding.blocks[i]] = None
                holding.num_registered = i + 1
        return new_blocks

    def free(self, request: Request) -> None:
        """Give all blocks back, the tail first, so that a prefix outlives its tail: those that can be hit to the end of
        the free queue, others to its front. Those promised to a step that has not run are forgotten: unwritten."""
        holding = self._held.pop(request.request_id, _Holding())
        num_written = max(0, request.num_computed_tokens - request.num_in_flight_tokens) // self.block_size
        for block in holding.blocks[num_written:]:
            self._forget(block)
        for block in holding.blocks:
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=False)
        for block in reversed(holding.blocks):
            if self._ref_counts[block] == 0 and self._block_hash[block] is not None:
                self._free.move_to_end(block)

    def _forget(self, block: int) -> None:
        block_hash, self._block_hash[block] = self._block_hash[block], None
        if block_hash is not None:
            del self._cached[block_hash][block]
            if not self._cached[block_hash]:
                del self._cached[block_hash]

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hashes of the request's first full blocks, each computed once: of its tokens and the hash before it."""
        hashes = self._held[request.request_id].hashes
        for i in range(len(hashes), num_blocks):
            tokens = array("q", request.token_ids[i * self.block_size : (i + 1) * self.block_size])
            hashes.append(sha256((hashes[-1] if hashes else b"") + tokens.tobytes()).digest())
        return hashes

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold; for tests, after every step."""
        for request_id, holding in self._held.items():
            assert len(set(holding.blocks)) == len(holding.blocks), f"{request_id} holds a block twice"
            assert holding.num_registered <= min(len(holding.blocks), len(holding.hashes))
        held = Counter(block for holding in self._held.values() for block in holding.blocks)
        assert self._ref_counts == [held[block] for block in range(self.num_blocks)], "counts differ from the tables"
        assert {*self._free} == {*range(self.num_blocks)} - {*held}, "the free queue is not what nobody holds"
        named = {(block_hash, block) for block_hash, blocks in self._cached.items() for block in blocks}
        assert named == {(h, block) for block, h in enumerate(self._block_hash) if h is not None}
        assert all(self._cached.values()), "an empty entry stayed in the prefix cache"
