"""PyTorch's caching allocator for CUDA, on paper: how much of a card a sequence of allocations really takes.

Rules as in c10/cuda/CUDACachingAllocator.cpp of torch 2.6 to 2.13 with its defaults, one stream. Sizes are multiples of
512 bytes. Up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, above that from a segment
of their own, rounded up to 2 MiB. The smallest free block that is large enough is taken and split where more than 1 MiB
(512 bytes in the small pool) is left. A freed block joins free neighbours and stays. When the card is full, segments
that are wholly free are given back, once, before the allocation fails.

With expandable segments there is one range of addresses for each pool, whose pages of 2 and 20 MiB are mapped when they
are needed and unmapped, wherever they are wholly free, when the card is full.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

MIB = 2**20
SMALL, LARGE = 0, 1
LARGEST_SMALL = MIB
SEGMENT = (2 * MIB, 20 * MIB)
"""Segments of the small pool, and of the large one up to 10 MiB; with expandable segments, pages."""
OWN_SEGMENT = 10 * MIB
FOREVER = 1 << 50

Event = tuple[int, int]
"""(number of a tensor, its bytes when it is made and 0 when it is dropped)."""


class OutOfMemory(Exception):
    """The card is full, and giving back what is wholly free did not help."""


@dataclass(slots=True)
class Block:
    """A piece of a segment."""

    address: int
    size: int
    pool: int
    free: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Segments from cudaMalloc, the default."""

    capacity: int
    reserved: int = 0
    allocated: int = 0
    most_reserved: int = 0
    most_allocated: int = 0
    retries: int = 0
    """How often the card was full and free segments were given back."""
    _free: tuple[list[tuple[int, int, Block]], ...] = field(default_factory=lambda: ([], []))
    _live: dict[int, Block] = field(default_factory=dict)
    _end: int = 0

    def malloc(self, tensor: int, size: int) -> None:
        """Place ``size`` bytes.

        Raises:
            OutOfMemory: no room.
        """
        size = rounded(size)
        pool = SMALL if size <= LARGEST_SMALL else LARGE
        free = self._free[pool]
        index = bisect.bisect_left(free, (size, -1))
        block = free.pop(index)[2] if index < len(free) else self._segment(size, pool)
        left = block.size - size
        if left >= 512 if pool == SMALL else left > LARGEST_SMALL:
            rest = Block(block.address + size, left, pool, before=block, after=block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self._keep(rest)
        block.free = False
        self._live[tensor] = block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def drop(self, tensor: int) -> None:
        """Take back what ``tensor`` held."""
        block = self._live.pop(tensor)
        self.allocated -= block.size
        block.free = True
        before, after = block.before, block.after
        if before and before.free:
            self._take(before)
            block.address, block.size, block.before = before.address, block.size + before.size, before.before
            if block.before:
                block.before.after = block
        if after and after.free:
            self._take(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after:
                block.after.before = block
        self._keep(block)

    def _segment(self, size: int, pool: int) -> Block:
        wanted = SEGMENT[pool] if size < OWN_SEGMENT else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + wanted > self.capacity:
            self.retries += 1
            for free in self._free:
                whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
                self.reserved -= sum(size for size, _, _ in whole)
                free[:] = [entry for entry in free if entry not in whole]
        if self.reserved + wanted > self.capacity:
            raise OutOfMemory
        self.reserved += wanted
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._end += wanted
        return Block(self._end - wanted, wanted, pool)

    def _keep(self, block: Block) -> None:
        bisect.insort(self._free[block.pool], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect.bisect_left(free, (block.size, block.address)))


Stretch = tuple[int, int]
"""(begin, end) in bytes."""


@dataclass(slots=True)
class _Range:
    """Addresses of one pool under expandable segments: holes between tensors, and what is mapped."""

    page: int
    holes: list[Stretch] = field(default_factory=lambda: [(0, FOREVER)])
    """In order, the last one open."""
    mapped: list[Stretch] = field(default_factory=list)
    """In order, in whole pages, neighbours joined."""

    def runs(self) -> list[Stretch]:
        """Mapped stretches of holes."""
        found, index = [], 0
        for begin, end in self.holes:
            while index < len(self.mapped) and self.mapped[index][1] <= begin:
                index += 1
            at = index
            while at < len(self.mapped) and self.mapped[at][0] < end:
                found.append((max(begin, self.mapped[at][0]), min(end, self.mapped[at][1])))
                at += 1
        return found

    def missing(self, begin: int, size: int) -> list[Stretch]:
        """What is not mapped of the pages under ``size`` bytes from ``begin``."""
        start, stop = begin // self.page * self.page, -(-(begin + size) // self.page) * self.page
        found = []
        for first, last in self.mapped:
            if last > start and first < stop:
                if first > start:
                    found.append((start, first))
                start = min(last, stop)
        return [*found, (start, stop)] if start < stop else found

    def map(self, stretches: list[Stretch]) -> None:
        """Map what was missing."""
        joined: list[Stretch] = []
        for begin, end in sorted([*self.mapped, *stretches]):
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self.mapped = joined

    def unmap(self) -> None:
        """Give back every page that lies in a hole."""
        for begin, end in self.holes:
            start, stop = -(-begin // self.page) * self.page, end // self.page * self.page
            if start >= stop:
                continue
            kept: list[Stretch] = []
            for first, last in self.mapped:
                if last <= start or first >= stop:
                    kept.append((first, last))
                else:
                    kept += [part for part in ((first, start), (stop, last)) if part[0] < part[1]]
            self.mapped = kept

    def fill(self, begin: int, size: int) -> None:
        """Cut ``size`` bytes out of the hole around ``begin``."""
        index = bisect.bisect_right(self.holes, (begin, FOREVER + 1)) - 1
        left, right = self.holes[index]
        pieces = [(left, begin), (begin + size, right)]
        self.holes[index : index + 1] = [piece for piece in pieces if piece[0] < piece[1]]

    def empty(self, begin: int, size: int) -> None:
        """Make a hole, joined with its neighbours."""
        end = begin + size
        index = bisect.bisect_left(self.holes, (begin, end))
        if index < len(self.holes) and self.holes[index][0] == end:
            end = self.holes.pop(index)[1]
        if index and self.holes[index - 1][1] == begin:
            index -= 1
            begin = self.holes.pop(index)[0]
        self.holes.insert(index, (begin, end))


@dataclass(slots=True)
class ExpandableAllocator:
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""

    capacity: int
    allocated: int = 0
    most_reserved: int = 0
    most_allocated: int = 0
    retries: int = 0
    _ranges: tuple[_Range, _Range] = field(default_factory=lambda: (_Range(SEGMENT[SMALL]), _Range(SEGMENT[LARGE])))
    _live: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """Bytes of all mapped pages."""
        return sum(end - begin for part in self._ranges for begin, end in part.mapped)

    def malloc(self, tensor: int, size: int) -> None:
        """Place ``size`` bytes.

        Raises:
            OutOfMemory: no room.
        """
        size = rounded(size)
        pool = SMALL if size <= LARGEST_SMALL else LARGE
        part = self._ranges[pool]
        fitting = [run for run in part.runs() if run[1] - run[0] >= size]
        # What can still grow counts as the largest of all.
        last = part.holes[-1][0]
        begin = min(fitting, key=lambda run: (run[0] >= last, run[1] - run[0]))[0] if fitting else self._map(part, size)
        part.fill(begin, size)
        self._live[tensor] = (pool, begin, size)
        self.allocated += size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def drop(self, tensor: int) -> None:
        """Take back what ``tensor`` held."""
        pool, begin, size = self._live.pop(tensor)
        self.allocated -= size
        self._ranges[pool].empty(begin, size)

    def _map(self, part: _Range, size: int) -> int:
        for last_try in (False, True):
            begin, missing = next(
                (begin, missing)
                for begin, end in part.holes
                if end - begin >= size and (missing := part.missing(begin, size))
            )
            if self.reserved + sum(stop - start for start, stop in missing) <= self.capacity:
                part.map(missing)
                self.most_reserved = max(self.most_reserved, self.reserved)
                return begin
            if not last_try:
                self.retries += 1
                for each in self._ranges:
                    each.unmap()
        raise OutOfMemory


Allocator = CachingAllocator | ExpandableAllocator


def rounded(size: int) -> int:
    """What is handed out for ``size`` bytes."""
    return max(512, -(-size // 512) * 512)


def runs(events: Iterable[Event], allocator: Allocator) -> bool:
    """Whether the card holds out to the end."""
    try:
        for tensor, size in events:
            if size:
                allocator.malloc(tensor, size)
            else:
                allocator.drop(tensor)
    except OutOfMemory:
        return False
    return True


def least_capacity(events: list[Event], kind: type[Allocator], within: int = 64 * MIB) -> tuple[int, Allocator]:
    """The smallest capacity under which ``events`` run, to ``within`` bytes, and the allocator of an endless card."""
    endless = kind(FOREVER)
    runs(events, endless)
    low, high = int(0.98 * endless.most_allocated), endless.most_reserved
    while high - low > within:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(events, kind(middle)) else (middle, high)
    return high, endless
