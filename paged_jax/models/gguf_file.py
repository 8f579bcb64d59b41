"""Reads the GGUF container: metadata and tensors.

The `gguf` package knows the quantisations; its own reader makes several arrays for each
string, which takes seconds for a vocabulary, and is not meant for damaged files.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, quants

from paged_jax.models.checkpoint import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
# Types that numpy can hold as they are.
_NATIVE = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


class TensorInfo(NamedTuple):
    """Where a tensor lies.

    Attributes:
        shape: in numpy's order, the slowest axis first.
        kind: its number format.
        start: offset in the file of its first byte.
        nbytes: its size.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


class GGUFFile:
    """A GGUF file, mapped into memory.

    Attributes:
        path: the file.
        metadata: values by key: int, float, bool, str, list of str, or a numpy array.
        tensors: the tensors by name.
    """

    def __init__(self, path: str | Path):
        """Reads the file's metadata; tensors are read on demand.

        Raises:
            CheckpointError: the file is missing, truncated or malformed.
        """
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise CheckpointError(f"{path} is not a GGUF file.")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot read: {error.strerror}") from error
        try:
            self._parse(_Cursor(self._data))
        except (EOFError, ValueError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{path} is truncated or malformed: {error}."
            ) from error

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor; F32, F16 and BF16 as they are, the others as float32.

        Raises:
            CheckpointError: it is not there, or its number format is unknown.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: the tensor {name!r} is missing.")
        info = self.tensors[name]
        if info.kind in _NATIVE:
            flat = np.frombuffer(
                self._data, _NATIVE[info.kind], math.prod(info.shape), info.start
            )
            return flat.reshape(info.shape)
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.start)
        try:
            rows = raw.reshape(-1, _bytes_at_once(info))
            # A damaged scale may be infinite; that is no reason to print a warning.
            with np.errstate(all="ignore"):
                return quants.dequantize(rows, info.kind).reshape(info.shape)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: the tensor {name!r} is of type {info.kind.name}, "
                "which cannot be read; use F32, F16, BF16, Q8_0, Q4_0 or Q4_1."
            ) from None

    def _parse(self, cursor: "_Cursor") -> None:
        cursor.take(4)
        version = cursor.unsigned(4)
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path} is GGUF version {version}; only {VERSIONS} are supported."
            )
        num_tensors, num_values = cursor.unsigned(8), cursor.unsigned(8)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(GGUFValueType(cursor.unsigned(4)))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        headers = [self._tensor_header(cursor) for _ in range(num_tensors)]
        base = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in headers:
            info = info._replace(start=base + info.start)
            if info.start + info.nbytes > len(self._data):
                raise ValueError(f"the tensor {name!r} reaches past the end")
            self.tensors[name] = info

    def _tensor_header(self, cursor: "_Cursor") -> tuple[str, TensorInfo]:
        name = cursor.string()
        shape = tuple(cursor.unsigned(8) for _ in range(cursor.unsigned(4)))[::-1]
        kind = GGMLQuantizationType(cursor.unsigned(4))
        start = cursor.unsigned(8)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block:
            raise ValueError(f"the tensor {name!r} has the shape {shape}")
        nbytes = math.prod(shape) // block * block_bytes
        return name, TensorInfo(shape, kind, start, nbytes)


def _bytes_at_once(info: TensorInfo) -> int:
    """Bytes of some whole quantisation blocks that divide a tensor evenly.

    `gguf.quants` takes 16 rows at a time, whatever their length: with rows of the
    tensor's own length half of the time goes into the calls.
    """
    block, block_bytes = GGML_QUANT_SIZES[info.kind]
    num_blocks = info.nbytes // block_bytes
    return max(math.gcd(num_blocks, 256), info.shape[-1] // block) * block_bytes


class _Cursor:
    """Reads values one after the other; EOFError where the file ends early."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self.position = 0

    def take(self, nbytes: int) -> bytes:
        start, end = self.position, self.position + nbytes
        if end > len(self._data):
            raise EOFError(f"it ends at byte {len(self._data)}, {end} are needed")
        self.position = end
        return self._data[start:end]

    def unsigned(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def string(self) -> str:
        return self.take(self.unsigned(8)).decode("utf-8")

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        return self._numbers(kind, 1)[0].item()

    def _array(self) -> Any:
        kind, count = GGUFValueType(self.unsigned(4)), self.unsigned(8)
        if kind == GGUFValueType.STRING:
            return self._strings(count)
        if kind == GGUFValueType.ARRAY:
            raise ValueError("it has an array of arrays")
        return self._numbers(kind, count)

    def _numbers(self, kind: GGUFValueType, count: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize * count), dtype)

    def _strings(self, count: int) -> list[str]:
        # The hot loop of loading: a vocabulary has 100,000 strings and more.
        data, position = self._data, self.position
        if position + 8 * count > len(data):
            raise EOFError(f"it ends at byte {len(data)}, within {count} strings")
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if position + 8 > len(data):
                raise EOFError(f"it ends at byte {len(data)}, within {count} strings")
            start = position + 8
            position = start + length_at(data, position)[0]
            strings.append(data[start:position].decode("utf-8"))
        self.position = position
        if position > len(data):
            raise EOFError(f"it ends at byte {len(data)}, {position} are needed")
        return strings
