"""Python functions that compiled programs call by name.

JAX's own callbacks are part of the program that calls them, so that it can't be kept on disk: every rank would compile
it at every start. A custom call is only named by the program; each process registers what the name stands for.

What XLA hands to a custom call is read as its C interface lays it out in memory (`xla/ffi/api/c_api.h`, which jaxlib
ships). Later versions with the same major number only add to the ends.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable
from ctypes import string_at
from functools import lru_cache
from typing import Any

import jax
import numpy as np

VERSION = (0, 1)  # the interface that is asked for: major, minor
CALL = struct.Struct("QQQQi4x QQqQQ QQqQQ")  # size, extension, api, context, stage; then arguments and results, each as
# size, extension, count, kinds, addresses of the buffers
BUFFER = struct.Struct("QQi4xQqQ")  # size, extension, kind, address of the data, rank, address of the shape
EXTENSION = struct.Struct("Qi4xQQ")  # size, kind, next, address of the metadata
METADATA = 1  # the kind of extension by which XLA asks which version a function was written for
ANSWER = 24  # where that is written in the metadata: after its size, and size and extension of the version
EXECUTE = 3  # the stage in which buffers hold data
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 11: 4, 12: 8}  # bool, int8-64, uint8-64, float32-64

Buffers = list[np.ndarray]  # each as bytes

_kept: dict[str, Any] = {}  # what is registered must live as long as the process
_raised: list[BaseException] = []
_threads: set[int] = set()


def register(name: str, function: Callable[[Buffers, Buffers], None]) -> None:
    """Let `name` stand for a function that reads the first buffers and fills the second.

    A program can't raise what the function raises: it goes on with zeros, and whoever called it calls `reraise`.
    """

    def answer(call: int) -> None:
        _, extension, _, _, stage, *several = CALL.unpack(string_at(call, CALL.size))
        if extension:
            _, kind, _, metadata = EXTENSION.unpack(string_at(extension, EXTENSION.size))
            if kind == METADATA:
                _memory(metadata + ANSWER, 8)[:] = np.asarray(VERSION, np.int32).view(np.uint8)
        elif stage == EXECUTE:
            _keep_thread()
            given, wanted = _buffers(several[2], several[4]), _buffers(several[7], several[9])
            try:
                if not _raised:
                    return function(given, wanted)
            except BaseException as error:
                _raised.append(error)
            for buffer in wanted:
                buffer[:] = 0

    _kept[name] = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(answer)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(_kept[name]), platform="cpu")


def reraise() -> None:
    """Raise what a function raised while a program called it."""
    if _raised:
        raise _raised.pop()


def _keep_thread() -> None:
    """Let the thread of this call stay known to Python: making it known anew takes longer than most functions do."""
    number = threading.get_ident()
    if number not in _threads:
        _threads.add(number)
        ctypes.pythonapi.PyGILState_Ensure()


def _buffers(count: int, addresses: int) -> Buffers:
    return [_buffer(address) for address in struct.unpack(f"{count}Q", string_at(addresses, 8 * count))]


def _buffer(address: int) -> np.ndarray:
    _, _, kind, data, rank, shape = BUFFER.unpack(string_at(address, BUFFER.size))
    return _view(data, kind, string_at(shape, 8 * rank))


@lru_cache(256)  # a loop calls with the same buffers at every turn
def _view(data: int, kind: int, shape: bytes) -> np.ndarray:
    return _memory(data, ITEM_BYTES[kind] * math.prod(struct.unpack(f"{len(shape) // 8}q", shape)))


def _memory(address: int, size: int) -> np.ndarray:
    return np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(address)), np.uint8)
