"""The rules of the prefix cache in plain Python: lists and dicts, no JAX.

A full block is known by the whole text up to its end, so that nothing here depends on
hashes, parents or links.
"""


class CachedMemory:
    """Blocks with a prefix cache, and rows that each hold a part of some text."""

    def __init__(self, num_blocks, num_rows, block_size, texts):
        self.num_rows = num_rows
        self.block_size = block_size
        self.texts = texts
        self.free = list(range(num_blocks, 0, -1))  # the next to be granted is the last
        self.ref_count = dict.fromkeys(range(1, num_blocks + 1), 0)
        self.cached = {}  # text up to a block's end -> block
        self.idle = []  # cached blocks without a user, least recently used first
        self.tables = {}  # row -> blocks
        self.text_of = {}  # row -> which text
        self.length = {}  # row -> tokens filled

    def start(self, row, text, num_tokens):
        """Starts a row with the blocks of the text's first tokens, found or new."""
        if row in self.tables:
            return "ROW_IN_USE"
        run = self.run(text, (num_tokens - 1) // self.block_size)
        need = -(-num_tokens // self.block_size) - len(run)
        available = len(self.free) + len(self.idle)
        if need > available - sum(block in self.idle for block in run):
            return "OUT_OF_BLOCKS"
        for block in run:
            self._hold(block)
        self._fill_row(row, text, run, need)
        return "OK"

    def share(self, source, target, num_tokens):
        """Starts a row with the full blocks that another has filled, and new ones."""
        if source not in self.tables:
            return "NOT_LIVE"
        if target in self.tables:
            return "ROW_IN_USE"
        blocks = self.tables[source][: self.length[source] // self.block_size]
        need = max(-(-num_tokens // self.block_size) - len(blocks), 0)
        if need > len(self.free) + len(self.idle):
            return "OUT_OF_BLOCKS"
        for block in blocks:
            self._hold(block)
        self._fill_row(target, self.text_of[source], blocks, need)
        return "OK"

    def fill(self, rows, num_tokens):
        """Fills some more tokens of each row; none goes past its blocks."""
        for row in rows:
            if row in self.tables:
                room = len(self.tables[row]) * self.block_size
                done = self.length[row] // self.block_size
                self.length[row] = min(self.length[row] + num_tokens, room)
                for logical in range(done, self.length[row] // self.block_size):
                    self._cache(row, logical)
        return "OK"

    def end(self, row):
        if row not in self.tables:
            return "NOT_LIVE"
        idle = []
        del self.text_of[row], self.length[row]
        for block in self.tables.pop(row):
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                kept = block in self.cached.values()
                (idle if kept else self.free).append(block)
        self.idle += reversed(idle)
        return "OK"

    def evict(self, count):
        for _ in range(min(count, len(self.idle))):
            self._evict()
        return "OK"

    def run(self, text, limit):
        """Returns the cached blocks at a text's start, `limit` at most."""
        blocks = []
        while len(blocks) < limit:
            end = (len(blocks) + 1) * self.block_size
            block = self.cached.get(tuple(self.texts[text][:end]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _fill_row(self, row, text, blocks, need):
        while len(self.free) < need:
            self._evict()
        self.tables[row] = [*blocks, *(self.free.pop() for _ in range(need))]
        for block in self.tables[row][len(blocks) :]:
            self.ref_count[block] = 1
        self.text_of[row] = text
        self.length[row] = len(blocks) * self.block_size

    def _hold(self, block):
        if block in self.idle:
            self.idle.remove(block)
        self.ref_count[block] += 1

    def _evict(self):
        block = self.idle.pop(0)
        self.cached = {k: b for k, b in self.cached.items() if b != block}
        self.free.append(block)

    def _cache(self, row, logical):
        end = (logical + 1) * self.block_size
        chain = tuple(self.texts[self.text_of[row]][:end])
        mine = self.tables[row][logical]
        block = self.cached.setdefault(chain, mine)
        if block != mine:
            self.tables[row][logical] = block
            self._hold(block)
            self.ref_count[mine] -= 1
            if self.ref_count[mine] == 0:
                self.free.append(mine)
