"""Everything at random times: requests, aborts, streams, prefixes that come and go."""

import random

import pytest
from random_service import KINDS, serve_at_random


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nothing shared"])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_is_returned_once_with_its_own_tokens(seed, kind):
    service = serve_at_random(kind, random.Random(seed))
    assert len(service.outputs) > 20
