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
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

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
# of numbers, as XLA counts them
KINDS = dict(enumerate(("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"), 1))

Buffers = list[np.ndarray]
Bind = Callable[[Buffers, Buffers], Callable[[], None]]  # what is given, what is wanted -> that reads and fills them
Found = list[tuple[list[Any], list[bytes]]]  # pieces of memory, and what was there: it says where the next ones are

MANY = 64  # bindings of one name; programs call with a few

F = TypeVar("F", bound=Callable[..., Any])
_arithmetic = ctypes.PyDLL("libm.so.6")
ORDINARY = ctypes.c_void_p(-1)  # what C calls FE_DFL_ENV

_kept: dict[str, Any] = {}  # what is registered must live as long as the process
_raised: dict[int, BaseException] = {}  # the first, by the thread that the program runs in
_threads: set[int] = set()
_entries: set[CodeType] = set()  # of the functions by which programs enter Python


def register(name: str, bind: Bind) -> None:
    """Let `name` stand for a function of buffers, which is bound to them once: a loop calls with the same every time.

    A program can't raise what the function raises: it goes on with zeros, and whoever called it calls `reraise`.
    """
    known: dict[tuple[int, ...], tuple[Found, Buffers, Callable[[], None]]] = {}  # by where programs tell of buffers
    calls: dict[int, Any] = {}  # pieces of memory in which programs told of a call

    def answer(call: int) -> None:
        wanted: Buffers = []
        try:
            piece = calls.get(call) or calls.setdefault(call, _memory(call, CALL.size))
            _, extension, _, _, stage, *several = CALL.unpack(piece.raw)
            if extension:
                _, kind, _, metadata = EXTENSION.unpack(_memory(extension, EXTENSION.size).raw)
                if kind == METADATA:
                    _view(metadata + ANSWER, "i4", (2,))[:] = VERSION
            if extension or stage != EXECUTE:
                return
            _keep_thread()
            key = several[2], several[4], several[7], several[9]
            before = known.get(key)
            if not before or _changed(before[0]):
                wanted_found, wanted = _buffers(*key[2:])
                given_found, given = _buffers(*key[:2])
                if len(known) == MANY:
                    known.clear()
                before = known[key] = given_found + wanted_found, wanted, bind(given, wanted)
            _, wanted, function = before
            if threading.get_ident() not in _raised:
                return function()
        except BaseException as error:
            _raised.setdefault(threading.get_ident(), error)
        for buffer in wanted:
            buffer[...] = 0

    _entries.add(answer.__code__)
    # Ctrl-C may be raised before the first line of `answer`, where nothing catches it. ctypes then returns what was in
    # memory, which XLA would take for an error and free: so the outer function calls one that returns nothing.
    safe = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(answer)
    _kept[name] = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(safe)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(_kept[name]), platform="cpu")


def in_full_range(function: F) -> F:
    """`function`, with the smallest numbers as they are outside of programs, for one thread at a time.

    XLA takes numbers below 1e-38 (1e-308 in double precision) for zero, and so does whatever its programs call: an
    environment would give other bits there than in a worker, or in MuJoCo's threads.
    """
    before = ctypes.create_string_buffer(64)  # more than any machine's state of arithmetic

    def called(*arguments: Any) -> Any:
        _arithmetic.fegetenv(before)
        _arithmetic.fesetenv(ORDINARY)
        try:
            return function(*arguments)
        finally:
            _arithmetic.fesetenv(before)

    return cast(F, called)


def reraise(thread: int | None = None) -> None:
    """Raise what a function raised while a program called it; where a `thread` is given, in that thread alone."""
    errors = [_raised.pop(number) for number in list(_raised) if thread in (None, number)]
    if errors:
        raise errors[0]


def raise_from_signal(error: BaseException, frame: FrameType | None) -> None:
    """Raise it in the frame that a signal came in; by `reraise`, where a program is just entering Python.

    What is raised there is lost, and a call of the program with it.
    """
    if frame is None or frame.f_code not in _entries:
        raise error
    _raised.setdefault(threading.get_ident(), error)


def _keep_thread() -> None:
    """Let the thread of this call stay known to Python: making it known anew takes longer than most functions do."""
    number = threading.get_ident()
    if number not in _threads:
        _threads.add(number)
        ctypes.pythonapi.PyGILState_Ensure()


def _buffers(count: int, addresses: int) -> tuple[Found, Buffers]:
    """The buffers that a program tells of, and what was read to know them."""
    pointers = [_memory(addresses, 8 * count)]
    structs = [_memory(address, BUFFER.size) for address in struct.unpack(f"{count}Q", pointers[0].raw)]
    told = [BUFFER.unpack(piece.raw) for piece in structs]
    shapes = [_memory(where, 8 * rank) for *_, rank, where in told]
    arrays = [
        _view(data, KINDS[kind], struct.unpack(f"{rank}q", piece.raw))
        for (_, _, kind, data, rank, _), piece in zip(told, shapes, strict=True)
    ]
    return [(pieces, [piece.raw for piece in pieces]) for pieces in (pointers, structs, shapes)], arrays


def _changed(read: Found) -> bool:
    """In this order: where a piece is may only be looked at while the piece that said so is as it was."""
    return any([piece.raw for piece in pieces] != found for pieces, found in read)


def _memory(address: int, size: int) -> Any:
    """What is there at any time is its `raw`: a tenth of the time that `ctypes.string_at` takes."""
    return (ctypes.c_char * size).from_address(address)


def _view(address: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    size = np.dtype(dtype).itemsize * math.prod(shape)
    return np.ndarray(shape, dtype, memoryview((ctypes.c_ubyte * size).from_address(address)))
