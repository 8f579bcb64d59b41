"""Checks that settings have the types that their dataclass declares."""

import dataclasses
import numbers
import types
from collections.abc import Iterable
from typing import Any, get_args

# What a declared type takes, and what it is called. NumPy's numbers are welcome.
_TAKES: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
    types.NoneType: (types.NoneType, "None"),
}


def check_types(
    settings: Any, error: type[Exception], skip: Iterable[str] = ()
) -> None:
    """Checks the fields of a dataclass that hold plain values or None.

    Args:
      settings: an instance; its annotations are types, not text.
      error: raised, with one line, for the first field of another type.
      skip: fields that are not looked at.

    Raises:
      error: a field has a value of another type.
    """
    for field in dataclasses.fields(settings):
        if field.name in skip:
            continue
        value = getattr(settings, field.name)
        union = isinstance(field.type, types.UnionType)
        declared = get_args(field.type) if union else (field.type,)
        taken = [_TAKES[kind] for kind in declared]
        # True counts as 1 to Python, and is a mistake here.
        fits = any(
            isinstance(value, kind) and isinstance(value, bool) <= (kind is bool)
            for kind, _ in taken
        )
        if not fits:
            allowed = " or ".join(name for _, name in taken)
            raise error(f"{field.name} is {value!r}; it must be {allowed}")
