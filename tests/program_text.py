"""What a compiled program does with its large arrays, read from its text."""

import re

# What leaves an array where it is, or changes some entries of it in place. A fusion
# stands for the operations of its own computation, which the text lists as well.
IN_PLACE = {
    "bitcast",
    "call",  # a loop over parts that run on several threads
    "conditional",
    "dynamic-update-slice",
    "fusion",
    "get-tuple-element",
    "opt-barrier",  # an identity, on the jax versions that keep it
    "parameter",
    "scatter",
    "tuple",
    "while",
}


def operations_on(text: str, dims: str) -> set[str]:
    """Returns the opcodes whose result has an array of shape `dims`, such as "4,8"."""
    instruction = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(", re.M)
    return {
        opcode for result, opcode in instruction.findall(text) if f"[{dims}]" in result
    }
