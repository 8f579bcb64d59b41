"""Everything at random times: requests, aborts, streams, prefixes that come and go."""

import random

import pytest
from random_service import KINDS, engine_of, serve_at_random

from paged_jax import Field


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nothing shared"])
def test_every_request_is_returned_once_with_its_own_tokens(kind):
    engine = engine_of(kind)
    engine.reset_stats()
    for seed in range(8):
        service = serve_at_random(kind, random.Random(seed))
        assert len(service.outputs) > 20
    preempted = engine.log[:, Field.PREEMPTED].sum()
    swapped = engine.log[:, Field.SWAPPED_OUT_BLOCKS].sum()
    if engine.config.batching == "static":
        assert preempted == 0
    else:
        assert preempted > 20
        assert (swapped > 0) == (engine.config.preemption != "recompute")
