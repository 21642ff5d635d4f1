"""Safetensors without a copy: the arrays are views of the bytes that were read."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np

DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "BOOL": "?"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"},
}
LENGTH = 8  # bytes that say how long the header is
LARGEST = 2**63  # no number in a header is as large


class Place(NamedTuple):
    """Where an array lies, in bytes from the end of the header."""

    begin: int
    end: int
    dtype: np.dtype
    shape: list[int]


def views(content: bytearray) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file by name; a ValueError where it is none."""
    header, start = _header(content)
    places = {name: _place(name, entry) for name, entry in header.items() if name != "__metadata__"}
    reached = 0
    for name, place in sorted(places.items(), key=lambda item: item[1][:2]):
        if place.begin != reached:
            raise ValueError(f"the array '{name}' does not begin where the one before it ends")
        reached = place.end
    if start + reached != len(content):
        raise ValueError("the arrays do not fill the file")
    return {name: _view(content, start, place) for name, place in places.items()}


def _header(content: bytearray) -> tuple[dict[str, Any], int]:
    """The header, and where it ends."""
    end = LENGTH + int.from_bytes(content[:LENGTH], "little")
    if len(content) < LENGTH or end > len(content):
        raise ValueError("the header is not as long as it says")
    header = json.loads(content[LENGTH:end])
    if not isinstance(header, dict):
        raise ValueError("the header is not a table of arrays")
    return header, end


def _place(name: str, entry: Any) -> Place:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the array '{name}' is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the array '{name}' is of an unknown dtype")
    if not _are_naturals(shape) or not _are_naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"shape or place of the array '{name}' are not whole numbers")
    place = Place(offsets[0], offsets[1], np.dtype(DTYPES[dtype]), shape)
    if place.end - place.begin != math.prod(shape) * place.dtype.itemsize:
        raise ValueError(f"the array '{name}' has another size than its shape says")
    return place


def _are_naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < LARGEST for value in values)


def _view(content: bytearray, start: int, place: Place) -> np.ndarray:
    if place.begin == place.end:
        return np.zeros(place.shape, place.dtype)
    flat = np.frombuffer(content, place.dtype, math.prod(place.shape), start + place.begin)
    return flat.reshape(place.shape)
