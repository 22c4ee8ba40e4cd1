"""Parameters cut into buckets: caps, order, alignment and riders, on whatever mixture of parameters."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from allstep.ddp.layout import BUCKET_ALIGNMENT, MIB, BucketCaps, ParameterSpec, plan_layout

ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "complex64": 8, "complex128": 16}
RIDERS = 7

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(ITEMSIZES))
kinds = st.tuples(shapes, dtypes, st.sampled_from(["cpu", "cuda:0"]))
caps_of_any_size = st.builds(BucketCaps, first=st.integers(1, 4000), middle=st.integers(1, 4000), last=st.integers(1, 4000))


def spec(index, shape, dtype="float32", device="cpu"):
    return ParameterSpec(name=f"p{index}", shape=shape, dtype=dtype, itemsize=ITEMSIZES[dtype], device=device)


def specs_of(drawn):
    return [spec(index, *kind) for index, kind in enumerate(drawn)]


def backwards(specs):
    return range(len(specs) - 1, -1, -1)


def caps(size):
    return BucketCaps(first=size, middle=size, last=size)


def names(layout):
    return [[slot.name for slot in bucket.slots] for bucket in layout.buckets]


@given(drawn=st.lists(kinds, min_size=1, max_size=25), cap=caps_of_any_size, data=st.data())
def test_every_parameter_has_one_place_and_places_do_not_overlap(drawn, cap, data):
    specs = specs_of(drawn)
    order = data.draw(st.permutations(range(len(specs))))
    layout = plan_layout(specs, order, cap, RIDERS)
    slots = [slot for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(slot.parameter for slot in slots) == list(range(len(specs)))
    ends = {}
    for index, bucket in enumerate(layout.buckets):
        assert bucket.index == index
        assert bucket.start * bucket.itemsize % BUCKET_ALIGNMENT == 0
        assert bucket.start >= ends.get((bucket.dtype, bucket.device), 0)
        ends[bucket.dtype, bucket.device] = bucket.start + bucket.numel
        at = 0
        for slot in bucket.slots:
            of = specs[slot.parameter]
            assert (slot.name, slot.numel, slot.offset) == (of.name, of.numel, at)
            assert (bucket.dtype, bucket.device, bucket.itemsize) == (of.dtype, of.device, of.itemsize)
            at += slot.numel
        assert (bucket.gradients, bucket.numel) == (at, at + bucket.riders)
        assert bucket.nbytes == bucket.numel * bucket.itemsize
    assert layout.storage_sizes() == ends


@given(drawn=st.lists(kinds, min_size=1, max_size=25), cap=caps_of_any_size)
def test_no_bucket_of_several_parameters_is_larger_than_the_largest_cap(drawn, cap):
    specs = specs_of(drawn)
    layout = plan_layout(specs, backwards(specs), cap, RIDERS)
    for bucket in layout.buckets:
        sized = [slot for slot in bucket.slots if slot.numel]
        if len(sized) > 1:
            assert bucket.gradients * bucket.itemsize <= max(cap.first, cap.middle, cap.last)


@given(drawn=st.lists(kinds, min_size=1, max_size=25), cap=st.integers(1, 4000))
def test_no_two_neighbours_of_one_kind_would_have_fitted_together(drawn, cap):
    """Else a user who raises the cap would not get fewer collectives."""
    specs = [spec(index, shape) for index, (shape, _, _) in enumerate(drawn)]
    layout = plan_layout(specs, backwards(specs), caps(cap), RIDERS)
    sizes = [[specs[slot.parameter].nbytes for slot in bucket.slots] for bucket in layout.buckets]
    for before, after in pairwise(sizes[:-1]):  # the last is filled from the end
        assert sum(before) + after[0] > cap


@given(drawn=st.lists(kinds, min_size=1, max_size=25), cap=caps_of_any_size, riders=st.integers(1, 30))
def test_riders_travel_in_the_last_bucket_and_that_counts_exactly(drawn, cap, riders):
    specs = specs_of(drawn)
    layout = plan_layout(specs, backwards(specs), cap, riders)
    assert [bucket.riders for bucket in layout.buckets] == [0] * (len(layout.buckets) - 1) + [riders]
    assert layout.buckets[-1].dtype == "float32"


@given(drawn=st.lists(shapes, min_size=1, max_size=25), cap=caps_of_any_size)
def test_with_one_kind_buckets_and_slots_follow_the_expected_order(drawn, cap):
    specs = [spec(index, shape) for index, shape in enumerate(drawn)]
    layout = plan_layout(specs, backwards(specs), cap, RIDERS)
    assert [slot.parameter for bucket in layout.buckets for slot in bucket.slots] == list(backwards(specs))


@given(drawn=st.lists(kinds, min_size=1, max_size=25), cap=caps_of_any_size)
def test_buckets_stand_in_the_order_in_which_their_last_gradient_is_expected(drawn, cap):
    specs = specs_of(drawn)
    layout = plan_layout(specs, backwards(specs), cap, RIDERS)
    lasts = [min(slot.parameter for slot in bucket.slots) for bucket in layout.buckets if bucket.slots]
    assert lasts == sorted(lasts, reverse=True)


@given(drawn=st.lists(kinds, min_size=1, max_size=10), cap=caps_of_any_size)
def test_equal_descriptions_give_equal_layouts_and_digests(drawn, cap):
    specs = specs_of(drawn)
    one, two = (plan_layout(specs_of(drawn), backwards(specs), cap, RIDERS) for _ in range(2))
    assert one == two
    assert one.digest() == two.digest()
    assert one.digest() != plan_layout(specs, backwards(specs), cap, RIDERS + 1).digest()
    assert len(json.loads(one.to_json())["buckets"]) == len(one.buckets)


def test_another_cap_order_name_or_shape_is_another_digest():
    def digest(cap=100, order=(1, 0), name="p0", shape=(4,)):
        specs = [ParameterSpec(name=name, shape=shape, dtype="float32", itemsize=4, device="cpu"), spec(1, (20,))]
        return plan_layout(specs, order, caps(cap), RIDERS).digest()

    digests = [digest(), digest(cap=90), digest(order=(0, 1)), digest(name="q"), digest(shape=(5,))]
    assert len(set(digests)) == len(digests)


def test_a_parameter_larger_than_the_cap_gets_a_bucket_of_its_own():
    specs = [spec(0, (2,)), spec(1, (1000,)), spec(2, (2,))]
    assert names(plan_layout(specs, backwards(specs), caps(16), RIDERS)) == [["p2"], ["p1"], ["p0"]]


def test_the_first_and_the_last_bucket_are_small_where_nobody_asked_for_a_size():
    default = BucketCaps.of(None, default_mb=5.0)
    assert (default.first, default.middle, default.last) == (MIB, 5 * MIB, MIB)
    specs = [spec(index, (256, 128)) for index in range(100)]  # 128 KiB each, 12.5 MiB together
    sizes = [bucket.gradients * 4 for bucket in plan_layout(specs, backwards(specs), default, RIDERS).buckets]
    assert (sizes[0], sizes[-1], max(sizes)) == (MIB, MIB, 5 * MIB)


def test_a_size_that_was_asked_for_holds_for_every_bucket():
    asked = BucketCaps.of(0.5, default_mb=5.0)
    assert (asked.first, asked.middle, asked.last) == (MIB // 2,) * 3
    assert BucketCaps.of(None, default_mb=0.25) == BucketCaps(first=MIB // 4, middle=MIB // 4, last=MIB // 4)


def test_one_half_precision_parameter_does_not_make_riders_inexact():
    specs = [spec(0, (3,), "bfloat16")]
    assert names(plan_layout(specs, [0], caps(100), RIDERS)) == [["p0"], []]
    assert plan_layout(specs, [0], caps(100), RIDERS).buckets[-1].riders == RIDERS


def test_parameters_without_elements_and_without_dimensions_have_a_place():
    specs = [spec(0, ()), spec(1, (0, 3)), spec(2, (2,))]
    (bucket,) = plan_layout(specs, backwards(specs), caps(100), RIDERS).buckets
    assert [(slot.name, slot.offset, slot.numel) for slot in bucket.slots] == [("p2", 0, 2), ("p1", 2, 0), ("p0", 2, 1)]


def test_a_layout_prints_bucket_bytes_dtype_and_names():
    specs = [spec(0, (3,)), spec(1, (2,), "float64")]
    text = str(plan_layout(specs, backwards(specs), caps(8), RIDERS))
    assert text.splitlines() == ["bucket 0: 16 bytes, float64 on cpu: p1", "bucket 1: 40 bytes, float32 on cpu: p0"]
    assert str(specs[1]) == "p1: float64[2]"
