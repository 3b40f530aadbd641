"""Arrays as text inside JSON come back as they were."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from graphkv.packing import Packer, unpack


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.random.default_rng(0).random((2, 3, 21)) < 0.5, "bits"),
        (np.arange(65_536).reshape(2, -1), "u2"),
        (np.array([0.0, -1.5, math.inf, 1e-38, 3.25], "f4"), "f4"),
        (np.empty((0,)), "u2"),
        (np.empty((2, 0), "f4"), "f4"),
    ],
)
def test_arrays_come_back(array, dtype):
    pack = Packer()
    name = pack.add(array, dtype)
    entry = json.loads(json.dumps(pack.arrays[name]))
    assert np.array_equal(unpack(entry), array) and unpack(entry).shape == array.shape
    assert pack.add(array.copy(), dtype) == name and len(pack.arrays) == 1


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"65,535"):
        Packer().add(np.array([65_536]), "u2")
