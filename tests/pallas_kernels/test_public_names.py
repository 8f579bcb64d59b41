"""What `pallas_kernels` itself offers."""

import subprocess
import sys

import pytest

import pallas_kernels
from pallas_kernels import compat


def test_every_public_name_is_there():
    if not compat.has_mosaic():
        pytest.skip("some of them need jax >= 0.11")
    for name in pallas_kernels.__all__:
        assert callable(getattr(pallas_kernels, name)) or name in (
            "BACKENDS",
            "QUERY_TILE",
        )


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="'paged_attention_mosaic'"):
        pallas_kernels.paged_attention_mosaic  # noqa: B018


def test_pallas_is_imported_only_when_it_is_asked_for():
    code = (
        "import sys, pallas_kernels; print('pallas_kernels.mosaic_ring' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
