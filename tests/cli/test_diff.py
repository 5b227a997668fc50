"""diff: compared with numpy's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everystep.cli import compare


def test_diff_counts_and_measures_what_changed(everystep, made, arrays):
    """Of two checkpoints exactly the changed tensors are named, with count and largest difference as numpy finds them."""
    before, after = arrays(1), arrays(1)
    after["model.weight"] = after["model.weight"].copy()
    after["model.weight"][2, 3] += 0.5
    after["model.weight"][0, 0] *= 2
    made.save(1, before, plain={"lr": 0.1, "same": 1})
    made.save(2, after, plain={"lr": 0.2, "same": 1})
    found = everystep("diff", made.path, "1", "2", "--json").json
    assert not found["equal"]
    [tensor] = found["tensors"]
    a, b = before["model.weight"].astype(np.float64), after["model.weight"].astype(np.float64)
    assert (tensor["name"], tensor["what"]) == ("model.weight", "content")
    assert tensor["numbers"]["count"] == 2
    assert tensor["numbers"]["elements"] == 35
    assert tensor["numbers"]["max_abs"] == pytest.approx(np.abs(a - b).max(), rel=1e-12)
    distance = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    assert tensor["numbers"]["max_rel"] == pytest.approx(np.nanmax(distance), rel=1e-12)
    assert found["values"] == [{"path": "lr", "a": 0.1, "b": 0.2}]
    text = everystep("diff", made.path, "1", "2").stdout
    assert "model.weight" in text
    assert "2 of 35" in text
    assert "model.bias" not in text


def test_diff_names_what_only_one_side_has_and_what_has_another_shape_or_dtype(everystep, made, arrays):
    """Missing, added, reshaped and retyped tensors are told apart."""
    one, other = arrays(1), arrays(1)
    del other["model.bias"]
    other["model.extra"] = np.zeros(3, np.int64)
    other["model.weight"] = np.zeros((6, 7), np.float32)
    other["optim.state.weight.step"] = np.array(1.0, np.float64)
    made.save(1, one)
    made.save(2, other)
    found = {item["name"]: item["what"] for item in everystep("diff", made.path, "1", "2", "--json").json["tensors"]}
    assert found == {"model.bias": "only-in-a", "model.extra": "only-in-b", "model.weight": "shape", "optim.state.weight.step": "dtype"}


def test_diff_of_equal_checkpoints_reads_no_data_and_says_equal(everystep, made, arrays):
    """Equal digests suffice: even with the data files gone, two equal checkpoints are found equal."""
    for step in (1, 2):
        key = made.save(step, arrays(5), plain={"x": float("nan")})
        for path in made.files(key):
            path.unlink()
    answer = everystep("diff", made.path, "1", "2")
    assert answer.code == 0
    assert "equal" in answer.stdout
    assert everystep("diff", made.path, "1", "2", "--json").json["equal"] is True


def test_diff_of_a_damaged_file_is_a_corruption(everystep, made, arrays):
    """F7: flipped bytes are not reported as a difference but as damage."""
    made.save(1, arrays(1))
    key = made.save(2, arrays(2))
    path = made.files(key)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    answer = everystep("diff", made.path, "1", "2", "--json")
    assert answer.code == 12
    assert answer.json["error"]["name"] == "CorruptionError"


@pytest.mark.parametrize(
    ("a", "b", "count", "max_abs", "max_rel"),
    [
        ([0.0], [-0.0], 1, 0.0, 0.0),
        ([1.0, float("nan")], [1.0, float("nan")], 0, 0.0, 0.0),
        ([1.0], [float("nan")], 1, float("inf"), float("inf")),
        ([float("inf")], [float("-inf")], 1, float("inf"), float("inf")),
        ([2.0, 0.0], [1.0, 0.0], 1, 1.0, 0.5),
        ([], [], 0, 0.0, 0.0),
    ],
)
def test_numbers_of_special_values(a, b, count, max_abs, max_rel):
    """Signed zeros, NaN, infinities and emptiness have their documented distances."""
    found = compare.numbers(torch.tensor(a), torch.tensor(b))
    assert (found.count, found.max_abs, found.max_rel) == (count, max_abs, max_rel)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn, torch.float64],
)
def test_numbers_of_every_kind_of_dtype(dtype):
    """A change of 1 to 0 in one of many elements is counted once, with a distance of 1, in every kind of dtype and across chunk borders."""
    a = torch.ones(compare.CHUNK + 3, dtype=torch.uint8).to(dtype)
    b = a.clone()
    b[-1] = 0
    found = compare.numbers(a, b)
    assert (found.count, found.elements, found.max_abs, found.max_rel) == (1, compare.CHUNK + 3, 1.0, 1.0)
