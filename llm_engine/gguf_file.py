"""The header of a GGUF file: its metadata, and the positions of its tensors. Reads no weights.

Layout: docs/gguf.md of ggml, versions 2 and 3, little-endian. Files come from strangers: each
length is compared with the rest of the file before a read of that length, and each count with a
limit before a loop of that length.
"""

import hashlib
import mmap
import reprlib
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from llm_engine.errors import CheckpointCorrupt, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes
# The largest vocabularies in use, with merges and scores, take 30 MiB.
MAX_HEADER_BYTES = 64 * 2**20
MAX_KEYS = 10_000
MAX_NAME_BYTES = 1024  # of a key or tensor; errors repeat it
MAX_ELEMENTS = 4_000_000  # of an array
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 4

# type |-> (elements, bytes) of a block; a row is whole blocks
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# The numbers of ggml's types; those without a block above are refused by name.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

# Number of a metadata type |-> format of struct and array; strings and arrays are handled below.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

Value: TypeAlias = "int | float | bool | str | list[str] | array[int] | array[float]"


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """One tensor in the header."""

    name: str  # "blk.0.attn_q.weight"
    type: str  # a key of BLOCKS
    shape: tuple[int, ...]  # rows first
    begin: int  # byte offsets in the file
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFHeader:
    """The header of a file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]  # by name
    digest: bytes  # of the header's bytes


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header of one file.

    Raises:
        CheckpointCorrupt: If the file is truncated, or contradicts its header.
        UnsupportedModel: If it has a version, byte order or tensor type that is not implemented.
    """
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, 2)
            if num_bytes < len(MAGIC):
                raise CheckpointCorrupt(f"{path}: not a GGUF file: it has {num_bytes} bytes")
            length = min(num_bytes, MAX_HEADER_BYTES)
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data, num_bytes).header()
    except OSError as error:
        raise CheckpointCorrupt(f"{path}: cannot be read: {error}") from error


class _HeaderReader:
    """Walks over the bytes of a header; `_at` is the next one."""

    def __init__(self, path: Path, data: mmap.mmap, file_bytes: int) -> None:
        self._path = path
        self._data = data
        self._file_bytes = file_bytes
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._data[: len(MAGIC)] != MAGIC:
            found = bytes(self._data[: len(MAGIC)])
            raise self._corrupt(f"not a GGUF file: it begins with {found!r}, not with {MAGIC!r}")
        self._at = len(MAGIC)
        self._check_version(self._number("I", "the version"))
        num_tensors = self._count("tensors", MAX_TENSORS)
        num_keys = self._count("metadata keys", MAX_KEYS)
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._corrupt(f"metadata key {key} is there twice")
            metadata[key] = self._value(key)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            shown = reprlib.repr(alignment)
            raise self._corrupt(f"general.alignment is {shown}, must be a power of two")
        tensors = self._tensors(num_tensors, alignment)
        return GGUFHeader(
            path=self._path,
            metadata=metadata,
            tensors=tensors,
            digest=hashlib.blake2b(self._data[: self._at], digest_size=16).digest(),
        )

    def _check_version(self, version: int) -> None:
        if version in VERSIONS:
            return
        if version.to_bytes(4, "little") in {each.to_bytes(4, "big") for each in VERSIONS}:
            raise UnsupportedModel(f"{self._path}: is big-endian, must be little-endian")
        allowed = " or ".join(map(str, VERSIONS))
        raise UnsupportedModel(f"{self._path}: is GGUF version {version}, must be {allowed}")

    def _value(self, key: str) -> Value:
        type_id = self._number("I", f"the type of {key}")
        if type_id == _STRING:
            return self._string(key)
        if type_id in _SCALARS:
            value: Value = self._number(_SCALARS[type_id], key)
            return value
        if type_id != _ARRAY:
            raise self._corrupt(f"metadata key {key} has type {type_id}, which GGUF does not have")
        type_id = self._number("I", f"the type of {key}")
        count = self._count(f"elements of {key}", MAX_ELEMENTS)
        if type_id == _STRING:
            return self._strings(count, key)
        if type_id not in _SCALARS:
            raise self._corrupt(
                f"metadata key {key} is an array of type {type_id}, which must be "
                "a string or a number"
            )
        # array has no booleans; they are kept as numbers.
        values: array[int] | array[float] = array(_SCALARS[type_id].replace("?", "B"))
        values.frombytes(self._bytes(count * values.itemsize, key))
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def _tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        described = [self._tensor_info() for _ in range(count)]
        data_begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, type_name, shape, offset in described:
            if name in tensors:
                raise self._corrupt(f"tensor {name} is there twice")
            if offset % alignment:
                raise self._corrupt(
                    f"tensor {name} has offset {offset}, must be a multiple of {alignment}"
                )
            begin = data_begin + offset
            end = begin + self._tensor_bytes(name, type_name, shape)
            if end > self._file_bytes:
                raise self._corrupt(
                    f"cut off: tensor {name} {list(shape)} of type {type_name} ends at byte {end}, "
                    f"the file has {self._file_bytes}"
                )
            tensors[name] = GGUFTensor(name=name, type=type_name, shape=shape, begin=begin, end=end)
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.begin)
        for first, second in pairwise(in_order):
            if second.begin < first.end:
                raise self._corrupt(f"tensors {first.name} and {second.name} overlap")
        return tensors

    def _tensor_info(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self._name("a tensor's name")
        num_dimensions = self._number("I", f"the shape of {name}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._corrupt(
                f"tensor {name} has {num_dimensions} dimensions, must be 1 to {MAX_DIMENSIONS}"
            )
        # The file has the fastest dimension first.
        sizes = [self._number("Q", f"the shape of {name}") for _ in range(num_dimensions)]
        shape = tuple(reversed(sizes))
        if not all(shape):
            raise self._corrupt(f"tensor {name} has shape {list(shape)}, must have no 0")
        type_id = self._number("I", f"the type of {name}")
        type_name = TYPE_NAMES.get(type_id, f"number {type_id}")
        if type_name not in BLOCKS:
            raise UnsupportedModel(
                f"{self._path}: tensor {name} has type {type_name}, "
                f"must be one of {', '.join(BLOCKS)}"
            )
        return name, type_name, shape, self._number("Q", f"the offset of {name}")

    def _tensor_bytes(self, name: str, type_name: str, shape: tuple[int, ...]) -> int:
        block_elements, block_bytes = BLOCKS[type_name]
        if shape[-1] % block_elements:
            raise self._corrupt(
                f"tensor {name} has rows of {shape[-1]} elements, must be a multiple of "
                f"{block_elements} for type {type_name}"
            )
        return prod(shape) // block_elements * block_bytes

    def _count(self, what: str, limit: int) -> int:
        count: int = self._number("Q", f"the number of {what}")
        if count > limit:
            raise self._corrupt(f"has {count} {what}, must be at most {limit}")
        return count

    def _name(self, what: str) -> str:
        at = self._at
        name = self._string(what, MAX_NAME_BYTES)
        if not (name and name.isprintable()):
            raise self._corrupt(f"{what} at byte {at} is {name!r}, must be printable")
        return name

    def _string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        num_bytes = self._number("Q", what)
        if limit < num_bytes <= len(self._data) - self._at:
            raise self._corrupt(f"{what} has {num_bytes} bytes, must be at most {limit}")
        raw = self._bytes(num_bytes, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{what} is not UTF-8: {error}") from error

    def _strings(self, count: int, what: str) -> list[str]:
        """Read an array without a call per element: vocabularies have hundreds of thousands."""
        data, at, end, unpack = self._data, self._at, len(self._data), _PACKED["Q"].unpack_from
        raw: list[bytes] = []
        while len(raw) < count and at + 8 <= end:
            begin = at + 8
            at = begin + unpack(data, at)[0]
            if at > end:
                break
            self._at = at
            raw.append(data[begin:at])
        if len(raw) < count:
            self._string(what)  # raises the error of the next one
        try:
            return [each.decode() for each in raw]
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{what} is not UTF-8: {error}") from error

    def _number(self, form: str, what: str) -> Any:
        packed = _PACKED[form]
        self._check_left(packed.size, what)
        [value] = packed.unpack_from(self._data, self._at)
        self._at += packed.size
        return value

    def _bytes(self, num_bytes: int, what: str) -> bytes:
        self._check_left(num_bytes, what)
        begin, self._at = self._at, self._at + num_bytes
        return self._data[begin : self._at]

    def _check_left(self, num_bytes: int, what: str) -> None:
        if self._at + num_bytes <= len(self._data):
            return
        if self._at + num_bytes <= self._file_bytes:
            raise self._corrupt(f"{what}: the header has more than {MAX_HEADER_BYTES} bytes")
        raise self._corrupt(
            f"cut off: {what} takes {num_bytes} bytes from byte {self._at} on, "
            f"the file has {self._file_bytes}"
        )

    def _corrupt(self, found: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self._path}: {found}")


_PACKED = {form: struct.Struct(f"<{form}") for form in _SCALARS.values()}
