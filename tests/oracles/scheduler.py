"""The scheduler in plain Python: the rules of the paper's section 4.

Blocks are names that tell them apart, and no more: which one a sequence gets is the
block tables' own test.
"""

import collections
import dataclasses
import itertools

from oracles.buddy import BuddyOracle


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sequence of a request, and how far it is."""

    name: int
    arrival: int
    prompt: int
    output: int
    reserved: int = 0  # tokens of a contiguous reservation
    generated: int = 0
    cached: int = 0  # tokens whose keys and values are in the cache
    table: list = dataclasses.field(default_factory=list)
    away: list = dataclasses.field(default_factory=list)  # blocks of the host instead
    row: int = 0  # the lowest free one; rows are released in order
    carrier: "Sequence | None" = None  # who computes its prompt, until it is forked
    leader: "Sequence | None" = None  # the first of its request
    ended: bool = False
    timeline: list = dataclasses.field(default_factory=lambda: [-1, -1, -1])

    @property
    def known(self):
        return self.prompt + self.generated


@dataclasses.dataclass
class Rules:
    """The settings that decide; names as in `EngineConfig`."""

    block_size: int
    num_blocks: int
    table_width: int
    max_seqs: int
    token_budget: int
    watermark_blocks: int
    spare_blocks: int
    chunked: bool
    paged: bool
    static: bool
    host_blocks: int = 0
    swaps_single: bool = False


class SchedulerOracle:
    """Runs requests, all known at time 0, and writes down each iteration.

    A request is a list of sequences with the same prompt.
    """

    def __init__(self, rules: Rules, requests: list[list[Sequence]]):
        self.rules = rules
        self.waiting = list(requests)
        for sequences in requests:
            for sequence in sequences:
                sequence.leader = sequences[0]
        self.batch: list[Sequence] = []
        self.users = collections.Counter()  # block -> tables that name it
        self.host_users = collections.Counter()  # the same for blocks of the host
        self.names = itertools.count()
        self.buddy = BuddyOracle(rules.num_blocks, rules.table_width)
        self.iteration = 0

    def run(self):
        rows = []
        while self.waiting or self.batch:
            rows.append(self.step())
        return rows

    # ------------------------------------------------------------------ blocks

    def blocks_for(self, tokens):
        return -(-tokens // self.rules.block_size)

    @property
    def free(self):
        if not self.rules.paged:
            return self.buddy.num_free
        return self.rules.num_blocks - len(self.users)

    def take(self):
        assert self.free > 0
        block = next(self.names)
        self.users[block] = 1
        return block

    def drop(self, block):
        self.users[block] -= 1
        if not self.users[block]:
            del self.users[block]

    # ------------------------------------------------------------------ a step

    def step(self):
        retired = self.retire()
        moved_in = self.bring_back()
        admitted = self.admit()
        chunks = self.divide()
        preempted, lost, moved_out = self.make_room(chunks)
        copied = self.write(chunks)
        complete = {s for s, n in chunks.items() if s.cached + n == s.known}
        forks = self.due(chunks)
        for sequence, size in chunks.items():
            sequence.cached += size
        running = self.running()
        row = {
            "RUNNING": len(running),
            "WAITING": len(self.waiting),
            "TOKENS": sum(chunks.values()),
            "LIVE": self.live(running),
            "RESERVED": self.distinct() * self.rules.block_size,
            "LOGICAL_BLOCKS": sum(len(s.table) for s in self.batch),
            "PHYSICAL_BLOCKS": self.distinct(),
            "FREE_BLOCKS": self.free,
            "RETIRED": retired,
            "ADMITTED": admitted,
            "PREEMPTED": preempted,
            "RECOMPUTED": lost,
            "COPIED_BLOCKS": copied,
            "SWAPPED": len({s.leader.name for s in self.batch if s.away}),
            "SWAPPED_OUT_BLOCKS": moved_out,
            "SWAPPED_IN_BLOCKS": moved_in,
        }
        complete |= {s for s in forks if s.carrier in complete}
        self.fork(forks)
        for sequence in complete:
            sequence.generated += 1
            if sequence.timeline[1] < 0:
                sequence.timeline[1] = self.iteration
            if sequence.generated == sequence.output:
                sequence.ended = True
                sequence.timeline[2] = self.iteration
        row["SAMPLED"] = len(complete)
        self.iteration += 1
        return row

    def running(self):
        return [
            s for s in self.batch if not s.ended and s.carrier is None and not s.away
        ]

    def live(self, running):
        """Slots of running sequences; of those shared with ended ones, their part."""
        names = collections.Counter(b for s in self.batch for b in s.table)
        size = self.rules.block_size
        shares = [
            1 / names[s.table[i // size]] for s in running for i in range(s.cached)
        ]
        return round(sum(shares))

    def distinct(self):
        return len({block for s in self.batch for block in s.table})

    def retire(self):
        ended = sorted((s for s in self.batch if s.ended), key=lambda s: s.row)
        if self.rules.static and len(ended) < len(self.batch):
            return 0
        for sequence in ended:
            self.release(sequence)
        return len(ended)

    def release(self, sequence):
        self.batch.remove(sequence)
        if self.rules.paged:
            for block in sequence.table:
                self.drop(block)
        else:
            start, size = sequence.table[0], len(sequence.table)
            self.buddy.release(start, (size - 1).bit_length())
        sequence.table, sequence.cached, sequence.carrier = [], 0, None

    # ------------------------------------------------------------------ admission

    def admit(self):
        rules = self.rules
        if (rules.static and self.batch) or any(s.away for s in self.batch):
            return 0
        pending = {s: self.pending(s) for s in self.batch}
        budget = rules.token_budget - sum(pending.values())
        owed = len(self.writes(pending))
        peaks = admitted = 0
        free_at_start = self.free
        while self.waiting:
            members = [s for s in self.waiting[0] if not s.ended]
            first = members[0]
            known = first.prompt if len(members) > 1 else first.known
            if len(self.batch) + len(members) > rules.max_seqs:
                break
            whole = min(known, rules.token_budget)
            if not rules.static and budget < (1 if rules.chunked else whole):
                break
            if rules.paged:
                headroom = owed + self.promised()
                if self.batch:
                    headroom += rules.watermark_blocks
                    headroom += (
                        rules.spare_blocks * (not rules.static) * len(self.batch)
                    )
                if self.first_need(members) + headroom > self.free:
                    break
                peak = self.need(members, [s.prompt + s.output for s in members])
                if rules.static and peaks + peak > free_at_start:
                    break
                peaks += peak
                first.table = [self.take() for _ in range(self.blocks_for(known))]
            else:
                order = (self.blocks_for(first.reserved) - 1).bit_length()
                if not self.buddy.can_allocate(order):
                    break
                start = self.buddy.allocate(order)
                first.table = list(range(start, start + 2**order))
            self.waiting.pop(0)
            for sequence in members:
                taken = {s.row for s in self.batch}
                sequence.row = min(set(range(rules.max_seqs)) - taken)
                sequence.carrier = None if sequence is first else first
                self.batch.append(sequence)
                if sequence.timeline[0] < 0:
                    sequence.timeline[0] = self.iteration
            budget -= known
            admitted += 1
        return admitted

    def need(self, members, tokens):
        """Blocks of sequences with so many tokens: the prompt's whole ones once."""
        whole = members[0].prompt // self.rules.block_size
        return whole + sum(self.blocks_for(n) - whole for n in tokens)

    def first_need(self, members):
        if len(members) == 1:
            return self.blocks_for(members[0].known)
        return self.need(members, [max(s.known, s.prompt + 1) for s in members])

    def promised(self):
        """Blocks that those who wait for a prompt will take, and who computes it."""
        count, carriers = 0, set()
        for s in self.batch:
            if s.carrier is not None:
                carriers.add(s.carrier)
                tokens = max(s.known, s.prompt + 1)
                count += self.blocks_for(tokens) - s.prompt // self.rules.block_size
        for s in carriers:
            tokens = max(s.known, s.prompt + 1)
            count += self.blocks_for(tokens) - self.blocks_for(s.prompt)
        return count

    # ------------------------------------------------------------------ the budget

    def pending(self, sequence):
        if sequence.ended or sequence.carrier is not None or sequence.away:
            return 0
        waited_for = any(s.carrier is sequence for s in self.batch)
        goal = sequence.prompt if waited_for else sequence.known
        return goal - sequence.cached

    def divide(self):
        pending = {s: self.pending(s) for s in self.batch}
        chunks = {s: 1 for s in self.batch if pending[s] == 1}
        left = self.rules.token_budget - len(chunks)
        prompts = [s for s in self.batch if pending[s] > 1]
        for sequence in sorted(prompts, key=lambda s: (s.arrival, s.row)):
            if left <= 0:
                break
            size = min(pending[sequence], left)
            if not self.rules.chunked and pending[sequence] <= self.rules.token_budget:
                if pending[sequence] > left:
                    break
            chunks[sequence] = size
            left -= size
        return chunks

    # ------------------------------------------------------------------ growth

    def writes(self, chunks):
        """Who needs a block to write its tokens: (sequence, what it is for).

        Of the sharers of a block that all write to it, all but the last one copy it.
        """
        if not self.rules.paged:
            return []
        needs, users = [], collections.Counter(self.users)
        for s in sorted(self.batch, key=lambda s: s.row):
            tokens = chunks.get(s, 0)
            logical = s.cached // self.rules.block_size
            if tokens and s.cached + tokens > len(s.table) * self.rules.block_size:
                needs.append((s, "grow"))
            elif tokens and users[s.table[logical]] > 1:
                users[s.table[logical]] -= 1
                needs.append((s, "copy"))
        return needs

    def due(self, chunks):
        """Who is forked: those whose carrier comes to the end of the prompt."""
        waits = [s for s in self.batch if s.carrier is not None]
        return [
            s for s in waits if s.carrier.cached + chunks.get(s.carrier, 0) >= s.prompt
        ]

    def tail(self, sequence):
        """Blocks for what it had generated before it was preempted."""
        return self.blocks_for(sequence.known) - self.blocks_for(sequence.prompt)

    def make_room(self, chunks):
        preempted = lost = moved = 0
        while True:
            forks = self.due(chunks)
            with_carriers = {*forks, *(s.carrier for s in forks)}
            tails = sum(map(self.tail, with_carriers))
            if len(self.writes(chunks)) + tails <= self.free:
                return preempted, lost, moved
            going = [s for s in self.batch if not s.ended and not s.away]
            victim = max(going, key=lambda s: (s.arrival, -s.row))
            group = sorted(
                (s for s in going if s.leader is victim.leader), key=lambda s: s.name
            )
            in_prompt = [min(s.cached, s.prompt) for s in group]
            own = max(in_prompt) + sum(s.cached for s in group) - sum(in_prompt)
            preempted += 1
            for sequence in group:
                chunks.pop(sequence, None)
            if own and self.may_swap(group):
                moved += self.swap_out(group)
                continue
            lost += own
            for sequence in group:
                self.release(sequence)
            self.waiting.insert(0, group)

    def write(self, chunks):
        copied = 0
        for sequence, what in self.writes(chunks):
            block = self.take()
            if what == "grow":
                sequence.table.append(block)
            else:
                logical = sequence.cached // self.rules.block_size
                self.drop(sequence.table[logical])
                sequence.table[logical] = block
                copied += 1
        return copied

    def fork(self, forks):
        carriers = {s.carrier for s in forks}
        for sequence in forks:
            sequence.table = list(sequence.carrier.table)
            self.users.update(sequence.table)
            sequence.cached, sequence.carrier = sequence.prompt, None
        for sequence in [*forks, *carriers]:
            sequence.table += [self.take() for _ in range(self.tail(sequence))]

    # ------------------------------------------------------------------ swap

    def may_swap(self, group):
        rules = self.rules
        several = rules.swaps_single or len(group) > 1
        forked = all(s.carrier is None for s in group)
        blocks = {b for s in group for b in s.table[: self.blocks_for(s.cached)]}
        room = rules.host_blocks - len(self.host_users)
        return several and forked and len(blocks) <= room

    def swap_out(self, group):
        """Moves each block with tokens once; returns how many there were."""
        moved = {}
        for s in group:
            for block in s.table[: self.blocks_for(s.cached)]:
                s.away.append(moved.setdefault(block, next(self.names)))
            self.host_users.update(s.away)
            for block in s.table:
                self.drop(block)
            s.table = []
        return len(moved)

    def bring_back(self):
        count = 0
        while away := [s for s in self.batch if s.away]:
            first = min(away, key=lambda s: s.arrival)
            group = [s for s in away if s.leader is first.leader]
            running = self.running()
            headroom = self.rules.watermark_blocks if running else 0
            headroom += self.rules.spare_blocks * len(running)
            headroom += len(self.writes({s: self.pending(s) for s in running}))
            headroom += self.promised()
            if self.need_back(group) + headroom > self.free:
                assert running, "nothing runs, and what was swapped out does not fit"
                break
            moved = {}
            for s in group:
                for block in s.away:
                    if block not in moved:
                        moved[block] = self.take()
                    else:
                        self.users[moved[block]] += 1
                    s.table.append(moved[block])
                    self.host_users[block] -= 1
                while len(s.table) < self.blocks_for(s.known):
                    s.table.append(self.take())
                s.away = []
            self.host_users = +self.host_users
            count += len(moved)
        return count

    def need_back(self, group):
        """Blocks that a group takes to come back and write its next tokens."""
        blocks = {b for s in group for b in s.away}
        ahead = [max(self.blocks_for(s.known) - len(s.away), 0) for s in group]
        written = [
            s.away[s.cached // self.rules.block_size]
            for s in group
            if s.cached // self.rules.block_size < len(s.away)
        ]
        return len(blocks) + sum(ahead) + len(written) - len(set(written))
