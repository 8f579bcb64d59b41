"""All rules of the block memory in one plain-Python model: lists and dicts, no JAX.

Block tables, reference counts, copy on write, the prefix cache, beams that change
places, and a host pool for sequences that are swapped out. A cached block is known by
the whole text up to its end, so that nothing depends on hashes, parents or links.
Statuses are the names of `paged_jax.block_tables.Status`.
"""

from collections.abc import Iterable, Sequence


class Pool:
    """Free blocks, the next to be granted last, and how many tables name each other."""

    def __init__(self, num_blocks: int):
        self.free = list(range(num_blocks, 0, -1))
        self.ref_count = [0] * (num_blocks + 1)

    def take(self) -> int:
        block = self.free.pop()
        self.ref_count[block] = 1
        return block


class Memory:
    """Blocks, what they hold, and the rows whose block tables name them.

    `texts[row]` says what each row holds, up to `length[row]`, and knows nothing of
    blocks; behind the rows stand texts to start from. `content` and `host_content` say
    what was written to each block, or copied or moved there. `read` looks a row up
    through its table; it must equal the row's text.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        host_blocks: int,
        num_rows: int,
        table_width: int,
        block_size: int,
        texts: Sequence[Sequence[int]],
        caching: bool,
    ):
        self.num_rows = num_rows
        self.table_width = table_width
        self.block_size = block_size
        self.caching = caching
        self.capacity = table_width * block_size
        self.device = Pool(num_blocks)
        self.host = Pool(host_blocks)
        self.tables: dict[int, list[int]] = {}  # row -> blocks
        self.swapped: set[int] = set()  # rows whose tables name blocks of the host
        self.length = [0] * num_rows
        self.texts = [[0] * self.capacity for _ in range(num_rows)]
        self.texts += [list(text) for text in texts]
        self.content = [[0] * block_size for _ in self.device.ref_count]
        self.host_content = [[0] * block_size for _ in self.host.ref_count]
        self.cached: dict[tuple[int, ...], int] = {}  # text up to a block's end
        self.chain_of: dict[int, tuple[int, ...]] = {}  # the other direction
        self.idle: dict[int, None] = {}  # cached, without a user; oldest use first
        self.evicted = self.merged = self.found = self.copied = 0
        self.beams_ended = self.shared_moves = 0

    # ------------------------------------------------------------------ what is there

    @property
    def available(self) -> int:
        return len(self.device.free) + len(self.idle)

    def runs(self, row: int) -> bool:
        return row in self.tables and row not in self.swapped

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def cached_run(self, text: Sequence[int], limit: int) -> list[int]:
        """Returns the cached blocks at a text's start, `limit` at most."""
        blocks: list[int] = []
        while len(blocks) < limit:
            block = self.cached.get(tuple(text[: (len(blocks) + 1) * self.block_size]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def read(self, row: int) -> list[int]:
        """Returns a row's tokens, looked up in the blocks that its table names."""
        content = self.host_content if row in self.swapped else self.content
        found = [token for block in self.tables[row] for token in content[block]]
        return found[: self.length[row]]

    # ------------------------------------------------------------------ rows begin

    def allocate(self, row: int, num_tokens: int, text: int) -> str:
        """Starts a row with new blocks, and fills them."""
        if not 0 <= row < self.num_rows or num_tokens < 1:
            return "OUT_OF_RANGE"
        if row in self.tables:
            return "ROW_IN_USE"
        if num_tokens > self.capacity:
            return "TABLE_OVERFLOW"
        if self.blocks_for(num_tokens) > self.available:
            return "OUT_OF_BLOCKS"
        self.texts[row] = list(self.texts[text])
        self.tables[row] = self._take(self.blocks_for(num_tokens))
        self._write(row, 0, num_tokens)
        self._cache_full_blocks(row, 0)
        return "OK"

    def start(self, row: int, num_tokens: int, text: int) -> str:
        """Starts a row with the cached blocks of a text, and others to be filled."""
        if row in self.tables:
            return "ROW_IN_USE"
        run = self.cached_run(self.texts[text], (num_tokens - 1) // self.block_size)
        need = self.blocks_for(num_tokens) - len(run)
        if need > self.available - sum(block in self.idle for block in run):
            return "OUT_OF_BLOCKS"
        self.texts[row] = list(self.texts[text])
        for block in run:
            self._hold(block)
        self.tables[row] = run + self._take(need)
        self.length[row] = len(run) * self.block_size
        self.found += len(run)
        return "OK"

    def share_prefix(self, source: int, target: int, num_tokens: int) -> str:
        if not 0 <= target < self.num_rows:
            return "OUT_OF_RANGE"
        if not self.runs(source):
            return "NOT_LIVE"
        if target in self.tables:
            return "ROW_IN_USE"
        if not 0 < num_tokens <= self.length[source]:
            return "OUT_OF_RANGE"
        self.texts[target] = list(self.texts[source])
        self.tables[target] = self.tables[source][: self.blocks_for(num_tokens)]
        for block in self.tables[target]:
            self._hold(block)
        self.length[target] = num_tokens
        return "OK"

    def fork(self, source: int, target: int) -> str:
        length = self.length[source] if 0 <= source < self.num_rows else 0
        return self.share_prefix(source, target, length)

    # ------------------------------------------------------------------ rows go on

    def append(self, tokens: dict[int, int]) -> str:
        """Appends to each row its token: to all of them, or to none."""
        if not all(self.runs(row) for row in tokens):
            return "NOT_LIVE"
        if any(self.length[row] == self.capacity for row in tokens):
            return "TABLE_OVERFLOW"
        return self._extend(dict.fromkeys(tokens, 1), tokens)

    def fill(self, rows: Iterable[int], num_tokens: int) -> str:
        """Fills some more of the blocks that each row was granted when it started."""
        room = {
            row: len(self.tables[row]) * self.block_size - self.length[row]
            for row in rows
            if self.runs(row)
        }
        return self._extend({row: min(n, num_tokens) for row, n in room.items() if n})

    def copy_on_write(self, row: int, logical: int) -> str:
        if not self.runs(row):
            return "NOT_LIVE"
        if not 0 <= logical < len(self.tables[row]):
            return "OUT_OF_RANGE"
        if self.device.ref_count[self.tables[row][logical]] > 1:
            if not self.available:
                return "OUT_OF_BLOCKS"
            self._copy(row, logical, *self._take(1))
        return "OK"

    # ------------------------------------------------------------------ rows change

    def repoint(self, parents: dict[int, int]) -> str:
        """Makes each row the continuation of its parent, which is one of them."""
        self.beams_ended += len(parents) - len(set(parents.values()))
        before = {row: list(self.tables[row]) for row in parents}
        texts = {row: self.texts[row] for row in parents}
        lengths = {row: self.length[row] for row in parents}
        for row, parent in parents.items():
            self.tables[row] = list(before[parent])
            self.texts[row] = list(texts[parent])
            self.length[row] = lengths[parent]
            for block in self.tables[row]:
                self.device.ref_count[block] += 1
        # Freed from the tables' ends on; each where it is named first.
        for logical in reversed(range(self.table_width)):
            column = [
                before[r][logical] for r in sorted(parents) if logical < len(before[r])
            ]
            for block in dict.fromkeys(column):
                self._drop([block] * column.count(block))
        return "OK"

    def swap_out(self, rows: Iterable[int]) -> str:
        """Moves rows to the host together: all of them, or none."""
        rows = sorted(rows)
        if not all(self.runs(row) for row in rows):
            return "NOT_LIVE"
        count = {row: self.blocks_for(self.length[row]) for row in rows}
        distinct = {b for row in rows for b in self.tables[row][: count[row]]}
        if len(distinct) > len(self.host.free):
            return "OUT_OF_BLOCKS"
        moved: dict[int, int] = {}
        for row in rows:
            table = self.tables[row]
            self.tables[row] = []
            for block in table[: count[row]]:
                if block in moved:
                    self.host.ref_count[moved[block]] += 1
                    self.shared_moves += 1
                else:
                    moved[block] = self.host.take()
                    self.host_content[moved[block]] = list(self.content[block])
                self.tables[row].append(moved[block])
            self._drop(table)
            self.swapped.add(row)
        return "OK"

    def swap_in(self, rows: Iterable[int], num_new: int) -> str:
        """Brings rows back, with blocks for some tokens more: all of them, or none."""
        rows = sorted(rows)
        if not self.swapped.issuperset(rows):
            return "NOT_LIVE"
        ahead = {
            row: self.blocks_for(self.length[row] + num_new) - len(self.tables[row])
            for row in rows
        }
        if any(
            n + len(self.tables[row]) > self.table_width for row, n in ahead.items()
        ):
            return "TABLE_OVERFLOW"
        distinct = {block for row in rows for block in self.tables[row]}
        if len(distinct) + sum(ahead.values()) > self.available:
            return "OUT_OF_BLOCKS"
        moved: dict[int, int] = {}
        for row in rows:
            table = self.tables[row]
            new = self._take(sum(b not in moved for b in table) + ahead[row])
            self.tables[row] = []
            for block in table:
                if block in moved:
                    self.device.ref_count[moved[block]] += 1
                else:
                    moved[block] = new.pop(0)
                    self.content[moved[block]] = list(self.host_content[block])
                self.tables[row].append(moved[block])
                self._drop_host(block)
            self.tables[row] += new
            self.swapped.remove(row)
        for row in rows:
            self._cache_full_blocks(row, 0)
        return "OK"

    # ------------------------------------------------------------------ rows end

    def release(self, row: int) -> str:
        if not self.runs(row):
            return "NOT_LIVE"
        self._drop(self.tables.pop(row))
        self.length[row] = 0
        return "OK"

    def abort(self, rows: Iterable[int]) -> str:
        """Ends rows wherever their blocks are."""
        for row in sorted(rows):
            if row in self.swapped:
                self.swapped.remove(row)
                for block in self.tables.pop(row):
                    self._drop_host(block)
                self.length[row] = 0
            self.release(row)
        return "OK"

    def evict(self, count: int) -> str:
        for _ in range(min(count, len(self.idle))):
            self._evict()
        return "OK"

    # ------------------------------------------------------------------ blocks

    def _extend(self, num_new: dict[int, int], tokens: dict[int, int] | None = None):
        """Writes the next tokens of rows, new ones or those of their texts.

        A row grows by one block at most. Of n sharers of a partly filled block that all
        write, n - 1 copy it: the last one owns it, once the others have left.
        """
        needs, users = [], list(self.device.ref_count)
        for row in sorted(num_new):
            table, logical = self.tables[row], self.length[row] // self.block_size
            if logical == len(table):
                needs.append((row, logical))
            elif users[table[logical]] > 1:
                users[table[logical]] -= 1
                needs.append((row, logical))
        if len(needs) > self.available:
            return "OUT_OF_BLOCKS"
        for (row, logical), block in zip(needs, self._take(len(needs)), strict=True):
            if logical == len(self.tables[row]):
                self.tables[row].append(block)
            else:
                self._copy(row, logical, block)
        for row, token in (tokens or {}).items():
            self.texts[row][self.length[row]] = token
        before = {row: self.length[row] for row in num_new}
        for row, count in num_new.items():
            self._write(row, self.length[row], count)
        for row in sorted(num_new):
            self._cache_full_blocks(row, before[row])
        return "OK"

    def _write(self, row: int, start: int, count: int) -> None:
        for position in range(start, start + count):
            logical, offset = divmod(position, self.block_size)
            block = self.tables[row][logical]
            assert self.device.ref_count[block] == 1, f"block {block} is shared"
            assert block not in self.chain_of, f"block {block} is cached"
            self.content[block][offset] = self.texts[row][position]
        self.length[row] = start + count

    def _copy(self, row: int, logical: int, new: int) -> None:
        old = self.tables[row][logical]
        self.content[new] = list(self.content[old])
        self.device.ref_count[old] -= 1
        self.tables[row][logical] = new
        self.copied += 1

    def _take(self, count: int) -> list[int]:
        while len(self.device.free) < count:
            self._evict()
        return [self.device.take() for _ in range(count)]

    def _hold(self, block: int) -> None:
        self.idle.pop(block, None)
        self.device.ref_count[block] += 1

    def _drop(self, blocks: Iterable[int]) -> None:
        """Takes one reference from each; the first cached one is the one used last."""
        idle = []
        for block in blocks:
            self.device.ref_count[block] -= 1
            if self.device.ref_count[block] == 0:
                kept = block in self.chain_of
                (idle if kept else self.device.free).append(block)
        self.idle.update(dict.fromkeys(reversed(idle)))

    def _drop_host(self, block: int) -> None:
        self.host.ref_count[block] -= 1
        if self.host.ref_count[block] == 0:
            self.host.free.append(block)

    def _evict(self) -> None:
        block = next(iter(self.idle))
        del self.idle[block]
        del self.cached[self.chain_of.pop(block)]
        self.device.free.append(block)
        self.evicted += 1

    def _cache_full_blocks(self, row: int, start: int) -> None:
        """Caches what a row has filled; equal blocks become one."""
        if not self.caching:
            return
        table = self.tables[row]
        for logical in range(
            start // self.block_size, self.length[row] // self.block_size
        ):
            chain = tuple(self.texts[row][: (logical + 1) * self.block_size])
            mine = table[logical]
            block = self.cached.setdefault(chain, mine)
            if block == mine:
                self.chain_of[block] = chain
            else:
                table[logical] = block
                self._hold(block)
                self._drop([mine])
                self.merged += 1
