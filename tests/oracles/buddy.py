"""A buddy allocator in plain Python: lists and a dict, one halving at a time."""


class BuddyOracle:
    """The rules of `paged_jax.buddy`.

    Attributes:
      free: for each order, the first blocks of its free chunks, the last freed last.
      allocated: the order of each allocated chunk, by its first block.
    """

    def __init__(self, num_blocks: int, max_blocks_per_request: int):
        largest = 1
        orders = 1
        while largest < max_blocks_per_request:
            largest *= 2
            orders += 1
        self.num_blocks = num_blocks
        self.free: list[list[int]] = [[] for _ in range(orders)]
        self.allocated: dict[int, int] = {}
        start = 1
        for order in reversed(range(orders)):
            while start + 2**order <= num_blocks + 1:
                self.free[order].insert(0, start)  # lower chunks are taken first
                start += 2**order

    @property
    def num_free(self) -> int:
        return sum(len(starts) * 2**order for order, starts in enumerate(self.free))

    def can_allocate(self, order: int) -> bool:
        return order >= 0 and any(self.free[order:])

    def allocate(self, order: int) -> int:
        """Returns the first block of the chunk, 0 if none fits."""
        if not self.can_allocate(order):
            return 0
        level = order
        while not self.free[level]:
            level += 1
        start = self.free[level].pop()
        while level > order:
            level -= 1
            self.free[level].append(start + 2**level)
        self.allocated[start] = order
        return start

    def release(self, start: int, order: int) -> bool:
        """Returns whether this chunk was allocated, and now is free."""
        if self.allocated.get(start) != order:
            return False
        del self.allocated[start]
        while order < len(self.free) - 1:
            buddy = 1 + ((start - 1) ^ 2**order)
            if buddy not in self.free[order]:
                break
            self.free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self.free[order].append(start)
        return True
