"""Reads typed fields from a checkpoint's metadata, with errors that name them."""

from typing import Any

from paged_jax.models.checkpoint import CheckpointError
from paged_jax.models.config import ModelConfig

_REQUIRED: Any = object()


class Fields:
    """A mapping of untrusted values.

    Attributes:
        where: names the file, for messages.
        values: the values by name. None counts as absent.
    """

    def __init__(self, where: str, values: dict[str, Any]):
        self.where = where
        self.values = values

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns an integer, or `default` where it is absent."""
        return self._get(name, default, "an integer", int)

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a float, or `default` where it is absent."""
        value = self._get(name, default, "a number", (int, float))
        return value if value is default else float(value)

    def positive(self, name: str) -> float:
        """Returns a float above 0."""
        value = self.number(name)
        if not value > 0:
            raise self._error(name, "a positive number", value)
        return value

    def boolean(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a bool, or `default` where it is absent."""
        return self._get(name, default, "true or false", bool)

    def string(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a string, or `default` where it is absent."""
        return self._get(name, default, "a string", str)

    def integers(self, name: str) -> tuple[int, ...]:
        """Returns the integers of a list, of a lone integer, or of nothing."""
        value = self.values.get(name)
        if value is None:
            return ()
        value = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise self._error(name, "an integer or a list of integers", value)
        return tuple(value)

    def section(self, name: str) -> "Fields | None":
        """Returns the fields of a nested mapping, or None where it is absent."""
        value = self._get(name, None, "an object", dict)
        return None if value is None else Fields(f"{self.where}: {name}", value)

    def build(self, **config: Any) -> ModelConfig:
        """Returns the ModelConfig, naming the file where a value is impossible."""
        try:
            return ModelConfig(**config)
        except ValueError as error:
            raise CheckpointError(f"{self.where}: {error}") from error

    def _get(self, name: str, default: Any, kind: str, types: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise CheckpointError(f"{self.where}: {name} is missing.")
            return default
        # bool is an int to Python, not to a configuration
        if not isinstance(value, types) or (isinstance(value, bool) != (types is bool)):
            raise self._error(name, kind, value)
        return value

    def _error(self, name: str, kind: str, value: Any) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointError(f"{self.where}: {name} must be {kind}, got {shown}.")
