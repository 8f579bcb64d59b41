"""The scheduler in plain Python: the rules of the paper's section 4.

Blocks are counted, not named: which one a sequence gets is the block tables' own test.
"""

import dataclasses

from oracles.buddy import BuddyOracle


@dataclasses.dataclass
class Request:
    """One request and how far it is."""

    name: int
    prompt: int
    output: int
    reserved: int = 0  # tokens of a contiguous reservation
    generated: int = 0
    cached: int = 0  # tokens whose keys and values are in the cache
    blocks: int = 0
    start: int = 0  # first block of a contiguous chunk
    row: int = 0  # the lowest free one; rows are released in order
    ended: bool = False
    timeline: list = dataclasses.field(default_factory=lambda: [-1, -1, -1])

    @property
    def known(self):
        return self.prompt + self.generated

    @property
    def pending(self):
        return 0 if self.ended else self.known - self.cached


@dataclasses.dataclass
class Rules:
    """The settings that decide; names as in `EngineConfig`."""

    block_size: int
    num_blocks: int
    table_width: int
    max_seqs: int
    token_budget: int
    watermark_blocks: int
    chunked: bool
    paged: bool
    static: bool


class SchedulerOracle:
    """Runs requests, all known at time 0, and writes down each iteration."""

    def __init__(self, rules: Rules, requests: list[Request]):
        self.rules = rules
        self.waiting = list(requests)
        self.batch: list[Request] = []
        self.free = rules.num_blocks
        self.buddy = BuddyOracle(rules.num_blocks, rules.table_width)
        self.iteration = 0

    def blocks_for(self, tokens):
        return -(-tokens // self.rules.block_size)

    def run(self):
        rows = []
        while self.waiting or self.batch:
            rows.append(self.step())
        return rows

    def step(self):
        retired = self.retire()
        admitted = self.admit()
        chunks = self.divide()
        preempted, lost = self.make_room(chunks)
        sampled = 0
        for request in self.batch:
            request.cached += chunks.get(request.name, 0)
        running = [r for r in self.batch if not r.ended]
        row = {
            "RUNNING": len(running),
            "WAITING": len(self.waiting),
            "TOKENS": sum(chunks.values()),
            "LIVE": sum(r.cached for r in running),
            "RESERVED": sum(r.blocks for r in self.batch) * self.rules.block_size,
            "FREE_BLOCKS": self.free if self.rules.paged else self.buddy.num_free,
            "RETIRED": retired,
            "ADMITTED": admitted,
            "PREEMPTED": preempted,
            "RECOMPUTED": lost,
        }
        for request in running:
            if request.name in chunks and request.cached == request.known:
                sampled += 1
                request.generated += 1
                if request.timeline[1] < 0:
                    request.timeline[1] = self.iteration
                if request.generated == request.output:
                    request.ended = True
                    request.timeline[2] = self.iteration
        row["SAMPLED"] = sampled
        self.iteration += 1
        return row

    def retire(self):
        ended = sorted((r for r in self.batch if r.ended), key=lambda r: r.row)
        if self.rules.static and len(ended) < len(self.batch):
            return 0
        for request in ended:
            self.release(request)
        return len(ended)

    def release(self, request):
        self.batch.remove(request)
        if self.rules.paged:
            self.free += request.blocks
        else:
            self.buddy.release(request.start, (request.blocks - 1).bit_length())
        request.blocks = request.cached = 0

    def grows(self, request, tokens):
        held = request.blocks * self.rules.block_size
        return self.rules.paged and tokens > 0 and request.cached + tokens > held

    def admit(self):
        rules = self.rules
        if rules.static and self.batch:
            return 0
        budget = rules.token_budget - sum(r.pending for r in self.batch)
        promised = 0
        free_at_start = self.free
        admitted = 0
        while self.waiting and len(self.batch) < rules.max_seqs:
            request = self.waiting[0]
            whole = min(request.known, rules.token_budget)
            if not rules.static and budget < (1 if rules.chunked else whole):
                break
            peak = self.blocks_for(request.prompt + request.output)
            if rules.paged:
                growing = [r for r in self.batch if r.cached]  # others have all theirs
                headroom = sum(self.grows(r, r.pending) for r in growing)
                if self.batch:
                    headroom += rules.watermark_blocks
                need = self.blocks_for(request.known)
                if need + headroom > self.free:
                    break
                if rules.static and promised + peak > free_at_start:
                    break
                promised += peak
                self.free -= need
                request.blocks = need
            else:
                order = (self.blocks_for(request.reserved) - 1).bit_length()
                if not self.buddy.can_allocate(order):
                    break
                request.start = self.buddy.allocate(order)
                request.blocks = 2**order
            self.waiting.pop(0)
            taken = {r.row for r in self.batch}
            request.row = min(set(range(rules.max_seqs)) - taken)
            self.batch.append(request)
            budget -= request.known
            admitted += 1
            if request.timeline[0] < 0:
                request.timeline[0] = self.iteration
        return admitted

    def divide(self):
        chunks = {r.name: 1 for r in self.batch if r.pending == 1}
        left = self.rules.token_budget - len(chunks)
        prompts = [r for r in self.batch if r.pending > 1]
        for request in sorted(prompts, key=lambda r: r.name):
            if left <= 0:
                break
            size = min(request.pending, left)
            if not self.rules.chunked and request.pending <= self.rules.token_budget:
                if request.pending > left:
                    break
            chunks[request.name] = size
            left -= size
        return chunks

    def make_room(self, chunks):
        preempted = lost = 0
        while True:
            growing = [r for r in self.batch if self.grows(r, chunks.get(r.name, 0))]
            if len(growing) <= self.free:
                break
            victim = max((r for r in self.batch if not r.ended), key=lambda r: r.name)
            lost += victim.cached
            chunks.pop(victim.name, None)
            self.release(victim)
            self.waiting.insert(0, victim)
            preempted += 1
        for request in growing:
            request.blocks += 1
            self.free -= 1
        return preempted, lost
