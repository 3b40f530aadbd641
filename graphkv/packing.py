"""Arrays as text inside JSON: little-endian bytes, gzip, base64; equal arrays are stored once."""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np

_DTYPES = {"bits": np.uint8, "u2": np.dtype("<u2"), "f4": np.dtype("<f4")}


class Packer:
    """Collects arrays under short names; `arrays` is the JSON value that `unpack` reads."""

    def __init__(self) -> None:
        self.arrays: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}

    def add(self, array: np.ndarray, dtype: str) -> str:
        """Store an array and return its name.

        Parameters
        ----------
        array
            Of any shape.
        dtype
            `bits`: booleans, each row of the last axis in bytes of its own, the first one in the lowest bit. `u2`:
            whole numbers from 0 to 65,535. `f4`: floats.
        """
        if dtype == "bits":
            data = np.packbits(array.astype(bool), axis=-1, bitorder="little")
        else:
            data = array.astype(_DTYPES[dtype])
            if dtype == "u2" and not np.array_equal(data, array):
                raise ValueError("an array with numbers beyond 65,535 does not fit into u2")
        planes = data.reshape(-1, 1).view(np.uint8).T  # all first bytes, then all second ones: they compress better
        text = base64.b64encode(gzip.compress(planes.tobytes(), mtime=0)).decode()
        entry = {"dtype": dtype, "shape": list(array.shape), "data": text}
        name = self._names.setdefault(repr(entry), f"a{len(self._names)}")
        self.arrays[name] = entry
        return name


def unpack(entry: dict[str, Any]) -> np.ndarray:
    """The array of an entry of `Packer.arrays`; `bits` come back as booleans."""
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    flat = np.frombuffer(gzip.decompress(base64.b64decode(entry["data"])), np.uint8)
    if entry["dtype"] == "bits":
        rows = flat.reshape(*shape[:-1], -1)
        return np.unpackbits(rows, axis=-1, count=shape[-1], bitorder="little").astype(bool)
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(flat.reshape(size, -1).T).view(dtype).reshape(shape)
