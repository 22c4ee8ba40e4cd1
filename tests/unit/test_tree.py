"""Sums over numbered places are those of one binary tree, whoever computes which part, and whatever places are empty."""

import itertools

import pytest
import torch

from allstep.comm.shm.reduction import tree
from allstep.ddp.tree import GradientTree, TreeSum


def of_tree(values):
    """By definition: each node is the sum of the two below it; a place without a value is not there."""
    nodes = list(values)
    while len(nodes) > 1:
        nodes += [None] * (len(nodes) % 2)
        nodes = [a if b is None else b if a is None else f"({a}{b})" for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]


def put_all(places):
    summed = TreeSum(lambda left, right: f"({left}{right})")
    for place in places:
        summed.put(place, "abcdefgh"[place])
    return summed


@pytest.mark.parametrize("there", [c for n in range(1, 9) for c in itertools.combinations(range(8), n)])
def test_every_choice_of_eight_places_gives_the_tree(there):
    expected = of_tree(["abcdefgh"[place] if place in there else None for place in range(8)])
    assert put_all(there).total() == expected


def test_no_value_gives_no_sum():
    assert TreeSum(torch.add).total() is None


def test_of_sixteen_values_never_more_than_four_are_kept_and_one_being_added():
    summed, most = TreeSum(lambda left, right: left + right), 0
    for place in range(16):
        summed.put(place, 1)
        most = max(most, len(summed.kept))
    assert most <= 5
    assert summed.total() == 16


@pytest.mark.parametrize("size", [2, 4])
def test_subtrees_of_ranks_added_in_order_are_the_tree(size):
    block = 8 // size
    of_ranks = []
    for rank in range(size):
        summed = TreeSum(lambda left, right: f"({left}{right})")
        for place in range(block):
            summed.put(place, "abcdefgh"[rank * block + place])
        of_ranks.append(summed.total())
    assert of_tree(of_ranks) == put_all(range(8)).total() == "(((ab)(cd))((ef)(gh)))"


def test_three_ranks_of_two_places_are_the_tree_over_six_as_shm_adds_them():
    of_ranks = [of_tree("ab"), of_tree("cd"), of_tree("ef")]
    for left, right in tree(3):
        of_ranks[left] = f"({of_ranks[left]}{of_ranks[right]})"
    assert of_ranks[0] == put_all(range(6)).total() == "(((ab)(cd))(ef))"


def gradients_of(places, used):
    """What autograd and the tree make of gradients, of two parameters; `used[place]` says which of them place has."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
    values = {place: [torch.randn(5) for _ in parameters] for place in range(8)}
    tree = GradientTree(parameters)
    for place in places:
        tree.begin(place)
        for index in used[place]:
            (parameters[index] * values[place][index]).sum().backward()
    if tree:
        tree.give_back([0])
        tree.give_back([1])
    tree.clear()
    assert not tree
    return parameters, values, tree.most_kept


@pytest.mark.parametrize("places", [range(8), [0], [1, 2, 3], [0, 3, 5], [0, 1, 4, 5, 6], [2, 7]])
@pytest.mark.parametrize("second", ["all", "some", "first"])
def test_gradients_are_summed_as_the_tree_over_places(places, second):
    places = list(places)
    has_second = {"all": places, "some": places[::2], "first": places[:1]}[second]
    used = {place: [0, 1] if place in has_second else [0] for place in places}
    parameters, values, _ = gradients_of(places, used)
    for index, parameter in enumerate(parameters):
        summed = TreeSum(torch.add)
        for place in places:
            if index in used[place]:
                summed.put(place, values[place][index].clone())
        assert torch.equal(parameter.grad, summed.total())


@pytest.mark.parametrize(("count", "kept"), [(1, 0), (2, 0), (4, 1), (8, 2)])
def test_one_set_less_than_levels_is_kept_aside(count, kept):
    assert gradients_of(range(count), {place: [0, 1] for place in range(count)})[2] == kept


def test_sparse_gradients_stay_where_they_are():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    tree = GradientTree([embedding.weight], apart=[0])
    for place in range(4):
        tree.begin(place)
        embedding(torch.tensor([place])).sum().backward()
    assert embedding.weight.grad.is_sparse
    assert embedding.weight.grad.to_dense().tolist() == [[1.0, 1.0]] * 4
