"""NumPy files of arrays, which a server writes between its steps.

    dense/0.npy    the first array in the dict that `write_arrays` returns

A server's files form a *piece* of the checkpoint. The description of the piece contains a checksum
of each file, and a reader compares the checksums.

The files are written with direct output (O_DIRECT), which bypasses the page cache. Orbax is not
used here, for two reasons. Orbax stores compressed data in memory until the write is complete. And
its compression delays trainers on the same host three times as long as copying the state. Direct
output needs a tenth of orbax's processor time, and `CHUNK` bytes of memory. Some file systems have
no direct output, such as older tmpfs. There the data is written through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dtrans.errors import DamagedError, DtransError, StateError
from dtrans.ir.selection import number_items


CHUNK = 4 << 20  # maximum number of bytes of one write
DIRECT = getattr(os, "O_DIRECT", 0)  # only Linux has this flag
# errors of NumPy, `zipfile` and orbax for damaged files; RuntimeError for an unknown compression
FORMAT_ERRORS = (ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile)
SUMMED = 8192  # a checksum is computed from sums, each over this number of bytes


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Write one file for each array; return {name: dtype} in the order of the files."""
    folder.mkdir()
    room = np.frombuffer(mmap.mmap(-1, CHUNK), np.uint8)
    for i, x in enumerate(arrays.values()):
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        _write(folder / f"{i}.npy", _header(x), data, room)
    return {name: str(x.dtype) for name, x in arrays.items()}


def checksums(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return a checksum of the file of each array, by name.

    Example:
      >>> import numpy as np
      >>> from dtrans.checkpoint.array_files import checksums
      >>> one, other = np.arange(10_000.0), np.arange(10_000.0)
      >>> other[7] = 8
      >>> checksums({"x": one}) == checksums({"x": other})
      False
    """
    found = {}
    for name, x in arrays.items():
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        found[name] = _checksum(_header(x), data)
    return found


def read_arrays(
    folder: Path,
    types: Mapping[str, str],
    names: Mapping[str, None],
    checksums: Mapping[str, int] = {},
) -> dict[str, np.ndarray]:
    """Read some of the arrays, by name.

    Args:
      folder: the folder that was passed to `write_arrays`.
      types: the result of `write_arrays`.
      names: the names of the arrays to read.
      checksums: the result of `checksums`; files without a checksum are not checked.

    Raises:
      FileNotFoundError: a file is missing.
      OSError: the system cannot read a file.
      ValueError: a file is damaged.
    """
    numbers, found = number_items(types), {}
    for name in names:
        path = folder / f"{numbers[name]}.npy"
        try:
            x = _read(path, checksums.get(name))
        except FileNotFoundError as e:
            raise FileNotFoundError(f"{path.name} with the array {name} is missing") from e
        except ValueError as e:
            raise ValueError(f"{path.name} with the array {name} cannot be read: {e}") from e
        found[name] = x.view(np.dtype(types[name]))
    return found


def _read(path: Path, checksum: int | None) -> np.ndarray:
    """Return the array in a file; compare the checksum, unless it is None."""
    data = np.fromfile(path, np.uint8)
    # 8 bytes of magic and version, and 2 bytes with the length of the rest of the header
    size = 10 + int.from_bytes(data[8:10].tobytes(), "little")
    header, data = data[:size].tobytes(), data[size:]
    if checksum is not None and _checksum(header, data) != checksum:
        raise ValueError("the file is damaged: its checksum has changed since the write")
    shape, _, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(header[8:]))
    return data.view(dtype).reshape(shape)


def _checksum(header: bytes, data: np.ndarray) -> int:
    """Return a checksum of a file: the CRC-32 of its header and of sums over the array's data.

    The CRC-32 of all data would double the processor time of a snapshot of a running server. Each
    sum has 64 bits, so every change of one byte changes the result.
    """
    size = len(data) // SUMMED * SUMMED
    sums = np.add.reduce(data[:size].view("<u8").reshape(-1, SUMMED // 8), axis=1)
    return zlib.crc32(data[size:].tobytes(), zlib.crc32(sums.tobytes(), zlib.crc32(header)))


@contextlib.contextmanager
def read_errors(content: str, remedy: str = "") -> Iterator[None]:
    """Convert errors of a `with` block that reads files of arrays to StateErrors.

    An unreadable file may be undamaged, if its permissions or its disk are the cause.

    Args:
      content: the unreadable files, for the error.
      remedy: a remedy to append to the error, or an empty string.

    Raises:
      DamagedError: a file is missing or damaged.
      StateError: the system cannot read a file.
    """
    try:
        yield
    except DtransError:
        raise
    except (OSError, *FORMAT_ERRORS) as e:
        kind = StateError
        if isinstance(e, (FileNotFoundError, NotADirectoryError, *FORMAT_ERRORS)):
            kind = DamagedError
        raise kind(f"{content}: {e}{remedy}") from e


def _header(x: np.ndarray) -> bytes:
    """Return the header of an array in NumPy's format, padded to a multiple of the page size.

    The format does not know types of other libraries, such as bfloat16, so these are written as raw
    bytes.
    """
    kind = np.dtype(f"V{x.dtype.itemsize}") if x.dtype.kind == "V" else x.dtype
    text = repr({"descr": kind.str, "fortran_order": False, "shape": x.shape}).encode("latin1")
    magic = np.lib.format.magic(1, 0)
    size = _round_to_pages(len(magic) + 2 + len(text) + 1)
    rest = size - len(magic) - 2
    return magic + rest.to_bytes(2, "little") + text.ljust(rest - 1) + b"\n"


def _round_to_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _write(path: Path, header: bytes, data: np.ndarray, room: np.ndarray) -> None:
    """Write a new file: the header, then the data.

    Direct output needs complete pages in page-aligned memory.

    Args:
      path: the file.
      header: the header, a multiple of the page size.
      data: the bytes of the array.
      room: a page-aligned buffer. Data that is not aligned is copied to it before a write.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _set_direct(descriptor, DIRECT)
        room[: len(header)] = np.frombuffer(header, np.uint8)
        _put(descriptor, room[: len(header)])
        for at in range(0, len(data), len(room)):
            chunk = data[at : at + len(room)]
            if data.ctypes.data % mmap.PAGESIZE or len(chunk) % mmap.PAGESIZE:
                room[: len(chunk)] = chunk
                chunk = room[: _round_to_pages(len(chunk))]
            _put(descriptor, chunk)
        os.ftruncate(descriptor, len(header) + len(data))
    finally:
        os.close(descriptor)


def _put(descriptor: int, data: np.ndarray) -> None:
    while len(data):
        try:
            count = os.write(descriptor, data.data)
        except OSError as e:
            if e.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT:
                raise
            # The file system needs larger pages, or accepts the flag without supporting it.
            _set_direct(descriptor, 0)
        else:
            data = data[count:]


def _set_direct(descriptor: int, direct: int) -> None:
    """Set or clear the flag for direct output, if the file system has this flag."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~DIRECT
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
