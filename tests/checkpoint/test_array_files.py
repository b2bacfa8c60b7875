"""Files of arrays that NumPy can read.

Direct writes of complete pages and ordinary writes give the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dtrans.checkpoint import array_files
from dtrans.checkpoint.array_files import read_arrays, write_arrays
from dtrans.protocol.buffers import BufferPool


PAGE = 4096


def arrays() -> dict[str, np.ndarray]:
    """Return arrays of NumPy's types and others, near the sizes of a page and of a chunk, with any
    alignment."""
    rng = np.random.default_rng(0)
    aligned = BufferPool(PAGE).take("x", (3 * PAGE + 5,), "uint8")
    aligned[:] = rng.integers(0, 256, len(aligned))
    return {
        "params/w.block0": rng.standard_normal((300, 7)),
        "a count": np.int32(5) * np.ones((), np.int32),
        "bfloat16": np.asarray(jnp.arange(12, dtype="bfloat16").reshape(3, 4)),
        "float8": np.asarray(jnp.arange(5, dtype="float8_e4m3fn")),
        "complex": rng.standard_normal(5) + 1j,
        "bool": np.array([True, False]),
        "columns": np.asfortranarray(rng.standard_normal((65, 33))),
        "strided": rng.standard_normal(40)[::3],
        "a page": np.arange(PAGE // 4, dtype=np.int32),
        "aligned": aligned,
        "from the second byte": aligned[1:],
    }


def same(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("chunk", [PAGE, 4 << 20])
def test_what_is_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(array_files, "CHUNK", chunk)
    held = arrays()
    types = write_arrays(tmp_path / "dense", held)
    assert list(types) == list(held)
    found = read_arrays(tmp_path / "dense", types, dict.fromkeys(reversed(held)))
    for name, x in held.items():
        same(found[name], x)
    np.testing.assert_array_equal(np.load(tmp_path / "dense" / "0.npy"), held["params/w.block0"])


@pytest.mark.parametrize("refuses", ["the option", "writes"])
def test_a_file_system_without_direct_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """The file system does not support direct writes.

    The error comes at once or with the first write.
    """
    write, set_flags, is_direct = os.write, fcntl.fcntl, {}

    def fake_fcntl(descriptor: int, command: int, flags: int = 0) -> Any:
        if command == fcntl.F_SETFL:
            if flags & array_files.DIRECT and refuses == "the option":
                raise OSError(errno.EINVAL, "no")
            is_direct[descriptor] = bool(flags & array_files.DIRECT)
            return 0
        flags = set_flags(descriptor, fcntl.F_GETFL)
        return flags | array_files.DIRECT if is_direct.get(descriptor) else flags

    def fake_write(descriptor: int, data: Any) -> int:
        if is_direct.get(descriptor):
            raise OSError(errno.EINVAL, "no")
        return write(descriptor, data)

    monkeypatch.setattr(fcntl, "fcntl", fake_fcntl)
    monkeypatch.setattr(os, "write", fake_write)
    held = arrays()
    types = write_arrays(tmp_path / "dense", held)
    for name, x in read_arrays(tmp_path / "dense", types, dict.fromkeys(held)).items():
        same(x, held[name])


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_arrays(tmp_path / "dense", arrays())


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    types = write_arrays(tmp_path / "dense", {"x": np.arange(5000)})
    os.truncate(tmp_path / "dense" / "0.npy", 20_000)
    with pytest.raises(ValueError, match="cannot reshape|array"):
        read_arrays(tmp_path / "dense", types, {"x": None})
