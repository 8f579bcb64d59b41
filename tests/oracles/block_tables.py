"""The rules of the paged memory in plain Python: lists and dicts, no JAX.

Everything happens one row after the other, as a reader would do it by hand. Statuses
are the names of `paged_jax.block_tables.Status`.
"""


class PagedMemory:
    """Blocks, their content, and the rows whose block tables name them.

    `tokens` says what each row should hold and knows nothing of blocks. `content` says
    what lies in each slot of each block, copies and all. `read` looks a row up through
    its table; it must equal `tokens`.
    """

    def __init__(self, num_blocks, num_rows, table_width, block_size):
        self.num_rows = num_rows
        self.table_width = table_width
        self.block_size = block_size
        self.free = list(range(num_blocks, 0, -1))  # the next to be granted is the last
        self.ref_count = dict.fromkeys(range(1, num_blocks + 1), 0)
        self.content = {b: [0] * block_size for b in range(1, num_blocks + 1)}
        self.tables = {}  # live row -> blocks
        self.tokens = {}  # live row -> tokens

    def allocate(self, row, tokens):
        if not 0 <= row < self.num_rows or not tokens:
            return "OUT_OF_RANGE"
        if row in self.tables:
            return "ROW_IN_USE"
        need = -(-len(tokens) // self.block_size)
        if need > self.table_width:
            return "TABLE_OVERFLOW"
        if need > len(self.free):
            return "OUT_OF_BLOCKS"
        self.tables[row] = [self._take() for _ in range(need)]
        self.tokens[row] = list(tokens)
        for position, token in enumerate(tokens):
            self._write(row, position, token)
        return "OK"

    def append(self, tokens):
        """Appends to each row of the dict `tokens` its token: to all, or to none."""
        rows = sorted(tokens)
        if any(row not in self.tables for row in rows):
            return "NOT_LIVE"
        if any(
            len(self.tokens[row]) == self.table_width * self.block_size for row in rows
        ):
            return "TABLE_OVERFLOW"
        if self._blocks_to_append(rows) > len(self.free):
            return "OUT_OF_BLOCKS"
        for row in rows:
            logical, offset = divmod(len(self.tokens[row]), self.block_size)
            if offset == 0:
                self.tables[row].append(self._take())
            elif self.ref_count[self.tables[row][logical]] > 1:
                self._copy(row, logical)
            self.tokens[row].append(tokens[row])
            self._write(row, len(self.tokens[row]) - 1, tokens[row])
        return "OK"

    def share_prefix(self, source, target, num_tokens):
        if not 0 <= target < self.num_rows:
            return "OUT_OF_RANGE"
        if source not in self.tables:
            return "NOT_LIVE"
        if target in self.tables:
            return "ROW_IN_USE"
        if not 0 < num_tokens <= len(self.tokens[source]):
            return "OUT_OF_RANGE"
        count = -(-num_tokens // self.block_size)
        self.tables[target] = self.tables[source][:count]
        self.tokens[target] = self.tokens[source][:num_tokens]
        for block in self.tables[target]:
            self.ref_count[block] += 1
        return "OK"

    def fork(self, source, target):
        return self.share_prefix(source, target, len(self.tokens.get(source, ())))

    def copy_on_write(self, row, logical):
        if row not in self.tables:
            return "NOT_LIVE"
        if not 0 <= logical < len(self.tables[row]):
            return "OUT_OF_RANGE"
        if self.ref_count[self.tables[row][logical]] > 1:
            if not self.free:
                return "OUT_OF_BLOCKS"
            self._copy(row, logical)
        return "OK"

    def overwrite(self, row, position, token):
        """Replaces a token in a block that `copy_on_write` has made the row's own."""
        self.tokens[row][position] = token
        self._write(row, position, token)

    def release(self, row):
        if row not in self.tables:
            return "NOT_LIVE"
        del self.tokens[row]
        for block in self.tables.pop(row):
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self.free.append(block)
        return "OK"

    def read(self, row):
        """Returns the row's tokens, looked up in the blocks that its table names."""
        places = (divmod(i, self.block_size) for i in range(len(self.tokens[row])))
        return [self.content[self.tables[row][b]][offset] for b, offset in places]

    def _take(self):
        block = self.free.pop()
        self.ref_count[block] = 1
        return block

    def _copy(self, row, logical):
        old, new = self.tables[row][logical], self._take()
        self.content[new] = list(self.content[old])
        self.ref_count[old] -= 1
        self.tables[row][logical] = new

    def _write(self, row, position, token):
        logical, offset = divmod(position, self.block_size)
        block = self.tables[row][logical]
        assert self.ref_count[block] == 1, (
            f"block {block} is shared: row {row} wrote it"
        )
        self.content[block][offset] = token

    def _blocks_to_append(self, rows):
        """Counts the blocks that `append` takes: n sharers of a block copy it n - 1
        times, for once all but one have left it the last owns it.
        """
        count, users = 0, dict(self.ref_count)
        for row in rows:
            logical, offset = divmod(len(self.tokens[row]), self.block_size)
            if offset == 0:
                count += 1
            elif users[self.tables[row][logical]] > 1:
                users[self.tables[row][logical]] -= 1
                count += 1
        return count
