"""The paper's numbers, with how each was come by (`data/paper.json`)."""

import functools
import json
from pathlib import Path
from typing import Any

SOURCE = "SOSP'23"
_FILE = Path(__file__).parent.parent / "data" / "paper.json"
# The paper's names of the systems, in the order in which it draws them.
NAMES = {
    "ft": "FasterTransformer",
    "orca_max": "Orca (Max)",
    "orca_pow2": "Orca (Pow2)",
    "orca_oracle": "Orca (Oracle)",
    "vllm": "vLLM",
}


@functools.cache
def numbers() -> dict[str, Any]:
    """Returns the numbers by figure."""
    return json.loads(_FILE.read_text("utf-8"))
