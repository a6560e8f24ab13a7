"""The pages of one kind and who holds them: free, referenced, or idle.

    free         nobody's; its content means nothing
    referenced   held by `count >= 1` sequences
    idle         held by nobody, but its content is kept because the prefix cache may hand it out again

    free + referenced + idle = total, at any time

Idle pages have a rank, a pair of numbers unique among them; the page of the least rank is the next to be given up.
"""

import heapq

Rank = tuple[int, int]


class PagePool:
    """Pages `first` to `first + total - 1`."""

    def __init__(self, first: int, total: int) -> None:
        self.first = first
        self.total = total
        self._counts = [0] * total
        self._free = list(range(first + total - 1, first - 1, -1))
        self._idle: dict[int, Rank] = {}
        self._order: list[tuple[Rank, int]] = []

    @property
    def free(self) -> int:
        """Pages that are nobody's."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that are kept for a later hit only."""
        return len(self._idle)

    @property
    def referenced(self) -> int:
        """Pages that sequences hold."""
        return self.total - self.free - self.idle

    @property
    def holders(self) -> int:
        """References to all pages together: what the sequences would hold if nothing were shared."""
        return sum(self._counts)

    def count(self, page: int) -> int:
        """How many sequences hold `page`."""
        return self._counts[page - self.first]

    def allocate(self) -> int:
        """A free page, now held once. There must be one."""
        page = self._free.pop()
        self._counts[page - self.first] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is referenced or idle."""
        assert self.count(page) or page in self._idle, f"page {page} is free"
        self._idle.pop(page, None)
        self._counts[page - self.first] += 1

    def release(self, page: int, rank: Rank | None) -> None:
        """One holder less; the last leaves the page idle under `rank`, or free where there is none."""
        assert self.count(page), f"page {page} is not held"
        self._counts[page - self.first] -= 1
        if self.count(page):
            return
        if rank is None:
            self._free.append(page)
        else:
            self.rank(page, rank)

    def rank(self, page: int, rank: Rank) -> None:
        """Put a page that nobody holds into the order of idle pages, or at another place in it."""
        assert not self.count(page), f"page {page} is held"
        self._idle[page] = rank
        heapq.heappush(self._order, (rank, page))
        if len(self._order) > 2 * len(self._idle) + 64:
            # Pages that were handed out again leave their old places behind.
            self._order = [(rank, page) for page, rank in self._idle.items()]
            heapq.heapify(self._order)

    def least(self) -> int:
        """The idle page that is given up next. There must be one."""
        while self._idle.get(self._order[0][1]) != self._order[0][0]:
            heapq.heappop(self._order)
        return self._order[0][1]

    def reclaim(self, page: int) -> None:
        """Make an idle page free."""
        del self._idle[page]
        self._free.append(page)
