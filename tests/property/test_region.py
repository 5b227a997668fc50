"""Boxes against numpy masks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from everystep.region import Region, boxes, is_run, missing, overlap, span, whole

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def regions_in(draw, shape):
    offsets, sizes = [], []
    for size in shape:
        begin = draw(st.integers(0, size))
        offsets.append(begin)
        sizes.append(draw(st.integers(0, size - begin)))
    return Region(tuple(offsets), tuple(sizes))


@st.composite
def cases(draw, count=6):
    shape = draw(shapes)
    return shape, draw(st.lists(regions_in(shape), max_size=count))


def mask(shape, region):
    made = np.zeros(shape, bool)
    made[tuple(slice(a, a + n) for a, n in zip(region.offsets, region.sizes, strict=True))] = True
    return made


@given(cases(count=2).filter(lambda case: len(case[1]) == 2))
def test_intersect_is_the_common_elements(case):
    """``intersect`` marks exactly the elements that both boxes mark, and None means none."""
    shape, (a, b) = case
    common = a.intersect(b)
    expected = mask(shape, a) & mask(shape, b)
    assert np.array_equal(np.zeros(shape, bool) if common is None else mask(shape, common), expected)
    assert (common is None) == (not expected.any())
    assert common == b.intersect(a)


@given(cases())
def test_missing_is_the_rest(case):
    """``missing`` marks exactly what no region marks, each element once."""
    shape, regions = case
    count = np.zeros(shape, int)
    for region in regions:
        count += mask(shape, region)
    gaps = np.zeros(shape, int)
    for gap in missing(shape, regions):
        assert gap.numel
        gaps += mask(shape, gap)
    assert np.array_equal(gaps, (count == 0).astype(int))


@given(cases())
def test_overlap_finds_a_pair_if_there_is_one(case):
    """``overlap`` answers None exactly when no element is marked twice, else two of the regions that meet."""
    shape, regions = case
    count = np.zeros(shape, int)
    for region in regions:
        count += mask(shape, region)
    pair = overlap(regions)
    assert (pair is not None) == bool((count > 1).any())
    if pair:
        assert pair[0] in regions
        assert pair[1] in regions
        assert (mask(shape, pair[0]) & mask(shape, pair[1])).any()


@given(full_shapes, st.data())
def test_boxes_tile_the_run_in_order(shape, data):
    """The boxes of a run mark its elements, in order, each box's first element where it says, and they are few."""
    numel = int(np.prod(shape, dtype=int))
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    flat = np.arange(numel).reshape(shape)
    found = []
    for box, first in boxes(shape, begin, end):
        values = flat[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))].ravel()
        assert values[0] == first
        found += values.tolist()
    assert found == list(range(begin, end))
    assert len(boxes(shape, begin, end)) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_span_and_run(shape, data):
    """``span`` is the first and past-the-last flat index, and ``is_run`` says whether all between are in the region."""
    region = data.draw(regions_in(shape))
    flat = np.flatnonzero(mask(shape, region).ravel())
    begin, end = span(shape, region)
    assert (begin, end) == ((int(flat[0]), int(flat[-1]) + 1) if len(flat) else (0, 0))
    assert is_run(shape, region) == (end - begin == len(flat))


@given(shapes, st.data())
def test_moving_there_and_back(shape, data):
    """``relative_to`` and ``moved_by`` undo each other, and a region fits its tensor."""
    region = data.draw(regions_in(shape))
    origin = data.draw(st.tuples(*[st.integers(0, 9)] * len(shape)))
    assert region.moved_by(origin).relative_to(origin) == region
    assert region.fits(shape)
    assert whole(shape).fits(shape)
