"""What ranks say to one another before they go on, with ranks that are threads around one table."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from allstep.comm.agreement import check_same_replicas, digest, fail_together, failing_together
from allstep.comm.communicator import SoloCommunicator
from allstep.errors import RankFailedError, ReplicaError
from allstep.testing.threads import on_threads


@pytest.mark.parametrize("odd", range(4))
def test_among_four_ranks_all_tell_the_same_story_of_the_one_that_differs(odd):
    lines = ["a: float32[2]", "b: float32[3]"]

    def compare(communicator):
        check_same_replicas(communicator, [*lines, "c: float32[4]"] if communicator.rank == odd else lines, "x=1")

    words = on_threads(4, compare)
    assert len({str(error) for error in words}) == 1
    assert {type(error) for error in words} == {ReplicaError}
    other = 1 if odd == 0 else odd
    with_more, without = ("rank 0", f"rank {other}") if odd == 0 else (f"rank {other}", "rank 0")
    assert f"{with_more} has c: float32[4]" in str(words[0])
    assert f"{without} has nothing" in str(words[0])
    assert "is number 2" in str(words[0])


def test_equal_models_with_other_arguments_are_told_apart_from_other_models():
    words = on_threads(3, lambda c: check_same_replicas(c, ["a"], f"bucket_cap_mb={c.rank // 2}"))
    assert {str(error) for error in words} == {
        "The ranks wrap their models differently: rank 0 with bucket_cap_mb=0, rank 2 with bucket_cap_mb=1. Write the same on "
        "every rank."
    }


def test_equal_models_pass_without_a_word():
    assert on_threads(3, lambda c: check_same_replicas(c, ["a", "b"], "x=1")) == [None] * 3
    check_same_replicas(SoloCommunicator(), ["a"], "x=1")


def test_an_error_of_one_rank_stops_all_and_each_knows_whose_it_was():
    def act(communicator):
        with failing_together(communicator, "reading the news"):
            if communicator.rank == 1:
                raise LookupError("no news")
        return "went on"

    first, second, third = on_threads(3, act)
    assert isinstance(second, LookupError)
    for rank, error in ((0, first), (2, third)):
        assert isinstance(error, RankFailedError)
        assert error.collateral
        assert str(error) == f"Rank 1 failed while reading the news: LookupError: no news. Rank {rank} stops with it."


def test_each_rank_that_failed_raises_its_own_error_and_the_others_hear_of_the_first():
    errors = [None, ValueError("one"), None, TypeError("three")]
    words = on_threads(4, lambda c: fail_together(c, errors[c.rank], "counting"))
    assert words[1] is errors[1]
    assert words[3] is errors[3]
    assert str(words[0]).startswith("Rank 1 failed while counting: ValueError: one (2 ranks failed).")


def test_without_an_error_all_go_on():
    assert on_threads(2, lambda c: fail_together(c, None, "counting")) == [None, None]


def test_what_ends_a_program_is_no_error_to_be_shared():
    def act(communicator):
        with failing_together(communicator, "waiting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        act(SoloCommunicator())


def test_equal_bits_have_equal_digests_whatever_their_memory_looks_like():
    tensor = torch.arange(6.0).reshape(2, 3)
    turned = tensor.t().contiguous().t()
    assert turned.stride() != tensor.stride()
    assert digest([("x", tensor)]) == digest([("x", turned)]) == digest([("x", tensor.clone().requires_grad_())])


@pytest.mark.parametrize(
    "other",
    [
        ("y", torch.zeros(2)),
        ("x", torch.zeros(1, 2)),
        ("x", torch.zeros(2, dtype=torch.int32)),
        ("x", torch.tensor([0.0, -0.0])),
        ("x", torch.tensor([0.0, 1e-45])),
    ],
    ids=["name", "shape", "dtype", "sign of zero", "last bit"],
)
def test_whatever_differs_changes_the_digest(other):
    assert digest([("x", torch.zeros(2))]) != digest([other])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.float8_e4m3fn),
        torch.tensor(5),
    ],
    ids=str,
)
def test_tensors_of_every_kind_have_a_digest(tensor):
    assert len(digest([("x", tensor)])) == 64


def test_a_tensor_that_is_made_of_others_has_the_digest_of_these():
    def made(*values):
        return [("x", TwoTensor(*(torch.tensor([value, 2.0]) for value in values)))]

    assert digest(made(1.0, 3.0)) == digest(made(1.0, 3.0))
    assert len({digest(made(1.0, 3.0)), digest(made(3.0, 1.0)), digest(made(1.0, 4.0))}) == 3
