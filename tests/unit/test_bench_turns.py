from collections import Counter

from allstep.cli.bench.blocks import Block
from allstep.cli.bench.turns import LONGEST, Turns


def run(turns, times, *, wall=1.0, foreign=lambda side, count: 0.0):
    """Play a measurement in which a block of each side takes `times[side]`; the order of the turns."""
    elapsed, order = 0.0, []
    while (side := turns.next(elapsed)) is not None:
        order.append(side)
        turns.add(side, Block(seconds=times[side], foreign=foreign(side, len(turns.blocks[side]))))
        elapsed += wall
    return order


def test_sides_take_turns_so_that_a_slow_minute_falls_on_all():
    order = run(Turns("abc", seconds=30), dict.fromkeys("abc", 1.0))
    assert len(order) >= 30
    for lap in range(len(order) // 3):
        assert sorted(order[3 * lap : 3 * lap + 3]) == ["a", "b", "c"]
    assert len({tuple(order[i : i + 3]) for i in range(0, 30, 3)}) > 1  # nobody is always behind the same neighbour


def test_each_side_gets_its_least_blocks_however_short_the_time():
    assert Counter(run(Turns("ab", seconds=0.1), dict.fromkeys("ab", 1.0))) == {"a": 3, "b": 3}
    assert Counter(run(Turns("ab", seconds=0.1, least=1), dict.fromkeys("ab", 1.0))) == {"a": 1, "b": 1}


def test_there_is_an_end_to_what_is_worth_measuring():
    assert Counter(run(Turns("ab", seconds=1e9, most=7), dict.fromkeys("ab", 1.0))) == {"a": 7, "b": 7}


def test_disturbed_blocks_are_done_again():
    turns = Turns("ab", seconds=4)
    order = run(turns, dict.fromkeys("ab", 1.0), foreign=lambda side, count: 0.5 * (side == "a" and count < 2))
    assert Counter(order)["a"] == 5
    assert 3 <= Counter(order)["b"] <= 4
    assert turns.spoilt == {"measured": len(order), "disturbed": 2, "enough": True}


def test_a_side_that_is_always_disturbed_starves_nobody():
    turns = Turns("abc", seconds=12)
    order = run(turns, dict.fromkeys("abc", 1.0), foreign=lambda side, count: 0.5 * (side == "a"))
    assert len(order) <= LONGEST * 12 + 2
    assert min(Counter(order).values()) >= 3
    assert turns.spoilt["enough"] is False


def test_a_machine_that_is_never_quiet_comes_to_an_end_and_says_so():
    turns = Turns("ab", seconds=10)
    order = run(turns, dict.fromkeys("ab", 1.0), foreign=lambda side, count: 0.5)
    assert 2 * 3 <= len(order) <= LONGEST * 10 + 2
    assert turns.spoilt == {"measured": len(order), "disturbed": len(order), "enough": False}
    assert len(turns.samples["a"]) == 3


def test_what_cannot_win_leaves_and_the_fastest_stays():
    turns = Turns(["ours"], racing=["slow", "fast", "close"], seconds=1e9, most=20)
    order = run(turns, {"ours": 1.0, "slow": 9.0, "fast": 2.0, "close": 2.0})
    assert Counter(order)["slow"] == 3
    assert Counter(order)["fast"] == Counter(order)["ours"] == 20
    assert (turns.racing, turns.best) == (["fast", "close"], "fast")


def test_a_side_that_left_need_not_have_enough():
    turns = Turns(["ours"], racing=["slow", "fast"], seconds=12)
    run(turns, {"ours": 1.0, "slow": 9.0, "fast": 2.0}, foreign=lambda side, count: 0.5 * (side == "slow"))
    assert turns.racing == ["fast"]
    assert turns.spoilt["enough"] is True


def test_one_quick_block_keeps_a_side_in_the_race():
    turns = Turns([], racing=["a", "b"], seconds=1)
    for seconds in (1.0, 1.0, 1.0):
        turns.add("a", Block(seconds=seconds, foreign=0.0))
    for seconds in (3.0, 0.9, 3.0):
        turns.add("b", Block(seconds=seconds, foreign=0.0))
    assert (turns.racing, turns.best) == (["a", "b"], "a")


def test_ranks_that_see_the_same_blocks_decide_alike():
    def play():
        return run(
            Turns("ab", racing="xyz", seconds=40),
            {"a": 1.0, "b": 2.0, "x": 3.0, "y": 3.1, "z": 2.9},
            foreign=lambda side, count: 0.3 * (count % 4 == 1),
        )

    assert play() == play()
