"""Headers of GGUF files as strangers may write them: one clear error, at once, and no memory."""

import json
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from llm_engine.errors import CheckpointCorrupt, EngineError, UnsupportedModel
from llm_engine.gguf_checkpoint import read_gguf_tensors
from llm_engine.gguf_config import model_config
from llm_engine.gguf_file import MAX_HEADER_BYTES, read_gguf_header
from llm_engine.gguf_tokenizer import tokenizer_files
from llm_engine.model_config import read_model_config
from tests.support.gguf_files import write_gguf
from tests.support.wall_clock import assert_within

UINT32, STRING, ARRAY = 4, 8, 9
F32, Q4_1, IQ4_XS = 0, 3, 23
HUGE = 2**60


def string(text: str, *, length: int | None = None) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def number_key(name: str, value: int) -> bytes:
    return string(name) + struct.pack("<II", UINT32, value)


def tensor(name: str, *sizes: int, type_id: int = F32, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return string(name) + dimensions + struct.pack("<IQ", type_id, offset)


def gguf_bytes(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    data: bytes = bytes(256),
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors))
    return header + bytes(-len(header) % 32) + data


def test_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    keys = (
        number_key("a.number", 7),
        string("a.text") + struct.pack("<I", STRING) + string("naïve"),
        string("a.list") + struct.pack("<IIQ", ARRAY, STRING, 2) + string("x") + string(""),
        string("a.floats") + struct.pack("<IIQ2f", ARRAY, 6, 2, 0.5, -2.0),
        string("a.truth") + struct.pack("<I?", 7, True),
    )
    tensors = (
        tensor("plain", 3, 2),
        tensor("blocks", 32, 2, type_id=Q4_1, offset=32),
    )
    path.write_bytes(gguf_bytes(keys, tensors))

    header = read_gguf_header(path)

    assert dict(header.metadata) | {"a.floats": list(header.metadata["a.floats"])} == {
        "a.number": 7,
        "a.text": "naïve",
        "a.list": ["x", ""],
        "a.floats": [0.5, -2.0],
        "a.truth": True,
    }
    plain, blocks = header.tensors["plain"], header.tensors["blocks"]
    assert (plain.type, plain.shape, plain.end - plain.begin) == ("F32", (2, 3), 24)
    assert (blocks.type, blocks.shape, blocks.end - blocks.begin) == ("Q4_1", (2, 32), 40)
    assert blocks.begin - plain.begin == 32
    assert plain.begin % 32 == 0


KEY = number_key("a", 1)
# name |-> (content, error, words)
HOSTILE: dict[str, tuple[bytes, type[EngineError], list[str]]] = {
    "empty": (b"", CheckpointCorrupt, ["not a GGUF file", "0 bytes"]),
    "another format": (b"PK\x03\x04" * 9, CheckpointCorrupt, ["not a GGUF file", "PK"]),
    "magic alone": (b"GGUF", CheckpointCorrupt, ["cut off", "version"]),
    "version 1": (gguf_bytes(version=1), UnsupportedModel, ["version 1", "2 or 3"]),
    "version 99": (gguf_bytes(version=99), UnsupportedModel, ["version 99"]),
    "big-endian": (gguf_bytes(version=3 << 24), UnsupportedModel, ["big-endian"]),
    "too many keys": (gguf_bytes(num_keys=2**63), CheckpointCorrupt, [str(2**63), "keys"]),
    "too many tensors": (gguf_bytes(num_tensors=HUGE), CheckpointCorrupt, [str(HUGE), "tensors"]),
    "more keys than there are": (
        gguf_bytes((KEY,), num_keys=9)[: 24 + len(KEY)],
        CheckpointCorrupt,
        ["cut off"],
    ),
    "an endless key": (
        gguf_bytes((string("a", length=HUGE),)),
        CheckpointCorrupt,
        ["cut off", "key", str(HUGE)],
    ),
    "a long key": (
        gguf_bytes((string("a" * 2000),)),
        CheckpointCorrupt,
        ["key has 2000 bytes, must be at most 1024"],
    ),
    "a key that moves the cursor": (
        gguf_bytes((number_key("\x1b[2J", 1),)),
        CheckpointCorrupt,
        [r"is '\x1b[2J', must be printable"],
    ),
    "a key without a name": (gguf_bytes((number_key("", 1),)), CheckpointCorrupt, ["is ''"]),
    "an endless text": (
        gguf_bytes((string("a") + struct.pack("<IQ", STRING, HUGE),)),
        CheckpointCorrupt,
        ["cut off", "a takes", str(HUGE)],
    ),
    "an endless list": (
        gguf_bytes((string("a") + struct.pack("<IIQ", ARRAY, UINT32, HUGE),)),
        CheckpointCorrupt,
        ["elements of a", str(HUGE)],
    ),
    "a long list that is not there": (
        gguf_bytes((string("a") + struct.pack("<IIQ", ARRAY, UINT32, 10**6),)),
        CheckpointCorrupt,
        ["cut off", "a takes 4000000 bytes"],
    ),
    "a list of texts that is not there": (
        gguf_bytes((string("a") + struct.pack("<IIQ", ARRAY, STRING, 10**6),)),
        CheckpointCorrupt,
        ["cut off", "a takes"],
    ),
    "a list with an endless text": (
        gguf_bytes((string("a") + struct.pack("<IIQQQ", ARRAY, STRING, 2, 0, HUGE),)),
        CheckpointCorrupt,
        ["cut off", "a takes", str(HUGE)],
    ),
    "a list of lists": (
        gguf_bytes((string("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1),)),
        CheckpointCorrupt,
        ["a is an array of type 9"],
    ),
    "an unknown kind of value": (
        gguf_bytes((string("a") + struct.pack("<I", 77),)),
        CheckpointCorrupt,
        ["a has type 77"],
    ),
    "text that is none": (
        gguf_bytes((string("a") + struct.pack("<IQ", STRING, 2) + b"\xff\xfe",)),
        CheckpointCorrupt,
        ["a is not UTF-8"],
    ),
    "a key twice": (gguf_bytes((KEY, KEY)), CheckpointCorrupt, ["key a is there twice"]),
    "no alignment": (
        gguf_bytes((number_key("general.alignment", 0),)),
        CheckpointCorrupt,
        ["general.alignment is 0", "power of two"],
    ),
    "an odd alignment": (
        gguf_bytes((number_key("general.alignment", 24),)),
        CheckpointCorrupt,
        ["general.alignment is 24"],
    ),
    "a tensor twice": (
        gguf_bytes(tensors=(tensor("t", 4), tensor("t", 4, offset=32))),
        CheckpointCorrupt,
        ["tensor t is there twice"],
    ),
    "overlapping tensors": (
        gguf_bytes(tensors=(tensor("t", 32, offset=32), tensor("u", 9))),
        CheckpointCorrupt,
        ["u and t overlap"],
    ),
    "an offset below 0": (
        gguf_bytes(tensors=(tensor("t", 4, offset=2**64 - 32),)),
        CheckpointCorrupt,
        ["cut off", "tensor t"],
    ),
    "an odd offset": (
        gguf_bytes(tensors=(tensor("t", 4, offset=4),)),
        CheckpointCorrupt,
        ["tensor t has offset 4", "multiple of 32"],
    ),
    "a tensor beyond the end": (
        gguf_bytes(tensors=(tensor("t", 65),)),
        CheckpointCorrupt,
        ["cut off: tensor t [65] of type F32 ends at byte"],
    ),
    "an endless tensor": (
        gguf_bytes(tensors=(tensor("t", HUGE, HUGE, HUGE),)),
        CheckpointCorrupt,
        ["cut off: tensor t"],
    ),
    "a tensor of nothing": (
        gguf_bytes(tensors=(tensor("t", 4, 0),)),
        CheckpointCorrupt,
        ["tensor t has shape [0, 4]"],
    ),
    "no dimension": (
        gguf_bytes(tensors=(tensor("t"),)),
        CheckpointCorrupt,
        ["tensor t has 0 dimensions"],
    ),
    "many dimensions": (
        gguf_bytes(tensors=(string("t") + struct.pack("<I", 2**31),)),
        CheckpointCorrupt,
        [f"tensor t has {2**31} dimensions"],
    ),
    "half a block": (
        gguf_bytes(tensors=(tensor("t", 48, type_id=Q4_1),)),
        CheckpointCorrupt,
        ["tensor t has rows of 48 elements", "multiple of 32 for type Q4_1"],
    ),
    "a type that is not implemented": (
        gguf_bytes(tensors=(tensor("t", 256, type_id=IQ4_XS),)),
        UnsupportedModel,
        ["tensor t has type IQ4_XS", "Q4_K"],
    ),
    "a type that nobody knows": (
        gguf_bytes(tensors=(tensor("t", 256, type_id=999),)),
        UnsupportedModel,
        ["tensor t has type number 999"],
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_by_name_and_at_once(tmp_path: Path, name: str) -> None:
    content, error, words = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    started = time.monotonic()

    with pytest.raises(error) as refusal:
        read_gguf_header(path)

    seconds, (_, peak_bytes) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for word in [str(path), *words]:
        assert word in str(refusal.value)
    assert peak_bytes < 2**20
    assert_within(seconds, 1)


def test_a_header_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    begin = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    path.write_bytes(begin + string("a") + struct.pack("<IQ", STRING, MAX_HEADER_BYTES))
    with path.open("r+b") as file:
        file.truncate(2 * MAX_HEADER_BYTES)  # a hole: it takes no space

    with pytest.raises(CheckpointCorrupt, match="a: the header has more than"):
        read_gguf_header(path)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"absent\.gguf: cannot be read"):
        read_gguf_header(tmp_path / "absent.gguf")


def read_all(path: Path, folder: Path) -> None:
    """As open_model, without the cache."""
    header = read_gguf_header(path)
    config = model_config(header)
    files = tokenizer_files(header)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(files["generation_config.json"])
    read_gguf_tensors(header, read_model_config(folder))


def test_damaged_files_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, num_hidden_layers=1)
    whole = path.read_bytes()
    header_bytes = min(each.begin for each in read_gguf_header(path).tensors.values())
    source = random.Random(5)
    num_refused = 0
    for round_number in range(400):
        damaged = bytearray(whole)
        if round_number % 4 == 0:
            del damaged[source.randrange(len(damaged)) :]
        else:
            for _ in range(source.choice([1, 1, 8])):
                at = source.randrange(header_bytes)
                damaged[at] = source.choice([0, 1, 0x7F, 0xFF, source.randrange(256)])
        path.write_bytes(damaged)
        try:
            read_all(path, tmp_path / "folder")
        except EngineError:
            num_refused += 1

    assert 200 < num_refused < 400
