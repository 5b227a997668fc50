"""Boxes: the cases by hand."""

from __future__ import annotations

import pytest

from everystep.region import Region, boxes, is_run, missing, overlap, span, whole


def test_a_scalar_is_one_element():
    """F4: a 0-dim tensor has one element, and its region meets itself."""
    scalar = whole(())
    assert scalar == Region((), ())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert missing((), []) == [scalar]
    assert missing((), [scalar]) == []
    assert overlap([scalar, scalar]) == (scalar, scalar)
    assert boxes((), 0, 1) == [(scalar, 0)]
    assert span((), scalar) == (0, 1)


def test_an_empty_tensor_lacks_nothing():
    """F12: a tensor without elements is covered by nothing at all, and empty regions overlap nothing."""
    assert whole((0, 3)).numel == 0
    assert missing((0, 3), []) == []
    assert overlap([Region((0, 0), (0, 3)), Region((0, 0), (2, 3))]) is None
    assert boxes((0, 3), 0, 0) == []
    assert span((0, 3), whole((0, 3))) == (0, 0)


def test_touching_boxes_do_not_meet():
    """Boxes that share only an edge have no common element."""
    assert Region((0,), (3,)).intersect(Region((3,), (2,))) is None
    assert Region((0,), (3,)).intersect(Region((2,), (2,))) == Region((2,), (1,))


def test_boxes_of_other_dimensions_are_an_error():
    """Intersecting a box with one of another number of dimensions is a mistake, not an empty result."""
    with pytest.raises(ValueError, match="zip"):
        whole((2,)).intersect(whole((2, 2)))


def test_missing_names_the_gap():
    """F6: the middle shard of three is named as missing."""
    assert missing((6, 4), [Region((0, 0), (2, 4)), Region((4, 0), (2, 4))]) == [Region((2, 0), (2, 4))]


@pytest.mark.parametrize("axis", [0, 1])
def test_overlap_of_many_shards_is_fast_and_right(axis):
    """Two thousand shards along either axis do not overlap; one moved by one row or column does."""
    count = 2000
    shards = [Region((i, 0) if axis == 0 else (0, i), (1, 8) if axis == 0 else (8, 1)) for i in range(count)]
    assert overlap(shards) is None
    shards[700] = Region((701, 0) if axis == 0 else (0, 701), shards[700].sizes)
    pair = overlap(shards)
    assert pair is not None
    assert set(pair) == {shards[700], shards[701]}
    assert shards[700].intersect(shards[701]) is not None


def test_overlap_of_a_grid_is_fast_and_right():
    """F14: four thousand cells of a two-dimensional mesh do not overlap, and their pairs are not looked at; one cell that is twice there, or moved, is found."""
    cells = [Region((64 * row, 64 * column), (64, 64)) for row in range(64) for column in range(64)]
    looked = []
    watched = type("Watched", (Region,), {"intersect": lambda self, other: looked.append(other)})
    assert overlap([watched(cell.offsets, cell.sizes) for cell in cells]) is None
    assert not looked
    assert overlap([*cells, cells[77]]) == (cells[77], cells[77])
    moved = Region((64, 63), (64, 64))
    assert moved in (overlap([*cells[:65], moved, *cells[66:]]) or ())


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 7)])
def test_boxes_refuses_ranges_out_of_the_box(begin, end):
    """A run that is not inside the box is a mistake."""
    with pytest.raises(ValueError, match="not in a box"):
        boxes((2, 3), begin, end)


@pytest.mark.parametrize(
    ("region", "shape", "good"),
    [
        (Region((0,), (3,)), (3,), True), (Region((3,), (0,)), (3,), True), (Region((1,), (3,)), (3,), False), (Region((-1,), (2,)), (3,), False),
        (Region((0,), (-1,)), (3,), False), (Region((0,), (-1,)), (-1,), False), (Region((0, 0), (3, 1)), (3,), False), (Region((0, 0), (3,)), (3,), False),
        (Region((), ()), (), True),
    ],
)  # fmt: skip
def test_fits(region, shape, good):
    """A region fits when it has the shape's dimensions and lies inside."""
    assert region.fits(shape) is good


def test_is_run_of_rows_and_columns():
    """Rows of a row-major box follow each other, columns do not, and a column of a box one wide does."""
    assert is_run((4, 3), Region((1, 0), (2, 3)))
    assert is_run((4, 3), Region((1, 1), (1, 2)))
    assert not is_run((4, 3), Region((0, 0), (4, 2)))
    assert is_run((4, 1), Region((1, 0), (2, 1)))


def test_a_region_reads_like_a_slice():
    """Messages show regions the way people write slices."""
    assert str(Region((2, 0), (3, 4))) == "[2:5, 0:4]"
