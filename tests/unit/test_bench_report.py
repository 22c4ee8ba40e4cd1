"""The words and tables of results that were made up here."""

import copy

import pytest

from allstep.cli.bench import picture
from allstep.cli.bench.blocks import Estimate
from allstep.cli.bench.report import markdown, size, table, tables, verdict

MACHINE = {"processor": "Abacus", "cores": 2, "system": "Linux x86_64", "python": "3.11.7", "load_average": 0.1}
COMMON = {"allstep": "0.1.0", "torch": "2.13.0", "machine": MACHINE, "wrong": []}
QUIET = {"measured": 40, "disturbed": 3, "enough": True}


def around(value, width=0.1):
    return {"value": value, "low": value * (1 - width), "high": value * (1 + width)}


def calls(ranks, nbytes, any_tensor, own=None, dtype="float32"):
    kinds = {"any": any_tensor, **({"own": own} if own else {})}
    return {
        "ranks": ranks,
        "bytes": nbytes,
        "dtype": dtype,
        "ms": {"gloo": 10.0, "floor": 0.5, **{kind: 10 / times for kind, times in kinds.items()}},
        "speedup": {kind: around(times) for kind, times in kinds.items()},
        "speedup_in_a_row": {kind: around(times / 2) for kind, times in kinds.items()},
        "over_floor": {kind: around(20 / times) for kind, times in kinds.items()},
        "blocks": QUIET,
        "wrong": [],
    }


def steps(ranks, model, optimizer, over_best, cost, accumulation=1):
    return {
        "ranks": ranks,
        "model": model,
        "optimizer": optimizer,
        "accumulation": accumulation,
        "best_torch": "torch views 5 MB",
        "ms": {"no sync": 20.0, "ours": 22.0, "ours on gloo": 31.0, "torch views 5 MB": 30.0},
        "over_best": around(over_best),
        "gloo_over_best": around(1.0),
        "over_no_sync": around(1.1),
        "best_over_no_sync": around(1.5),
        "sync_cost": None if cost is None else around(cost),
        "gloo_sync_cost": None,
        "parameters": "equal bits",
        "blocks": QUIET,
        "wrong": [],
    }


def trained(ranks, over_bare, over_peer):
    peer = {} if over_peer is None else {"transformers": 400.0}
    return {
        "ranks": ranks,
        "steps_per_second": {"allstep": 900.0, "bare": 1000.0, **peer},
        "over_bare": around(over_bare, 0.01),
        "over_peer": None if over_peer is None else around(over_peer, 0.01),
        "blocks": QUIET,
        "wrong": [],
    }


ALLREDUCE = {
    **COMMON,
    "benchmark": "allreduce",
    "backend": "shm",
    "rows": [
        calls(2, 4096, 21.0, 21.0),
        calls(2, 1 << 20, 0.5, 0.5),
        calls(2, 4 << 20, 7.0, 14.0),
        calls(2, 25 << 20, 7.0, 14.0),
        calls(4, 4096, 3.0),
        calls(2, 4096, 99.0, dtype="bfloat16"),
    ],
}
DDP = {
    **COMMON,
    "benchmark": "ddp",
    "backend": "shm",
    "models": {"mlp32": "an MLP", "resnet": "a ResNet"},
    "rows": [
        steps(2, "mlp32", "sgd", 0.5, 0.1),
        steps(2, "resnet", "sgd", 0.98, None),
        steps(2, "mlp32", "sgd", 3.0, 0.4, accumulation=8),
        steps(4, "mlp32", "sgd", 0.7, 0.2),
    ],
}
TRAINER = {**COMMON, "benchmark": "trainer", "rows": [trained(1, 0.8, 2.5), trained(2, 1.0, 5.0)]}
LAUNCH = {
    **COMMON,
    "benchmark": "launch",
    "rows": [
        {"launcher": name, "ranks": 2, "seconds": seconds}
        for name, seconds in (("bare processes", 2.0), ("allstep launch", 2.1), ("torchrun --standalone", 4.0))
    ],
    "best_torchrun": "torchrun --standalone",
    "own_cost_over_torchrun": around(0.05),
    "over_torchrun": around(0.525),
    "imports": {"allstep": {"ms": 20.0, "loads_torch": False}, "torch": {"ms": 900.0, "loads_torch": True}},
    "blocks": QUIET,
}
RESULTS = {result["benchmark"]: result for result in (ALLREDUCE, DDP, TRAINER, LAUNCH)}


def test_the_verdict_on_all_reduce_tells_large_and_small_calls_apart_and_each_kind_of_tensor():
    two, four, trust = verdict(ALLREDUCE).splitlines()
    assert two == (
        "2 ranks, float32, shm against gloo: on tensors of the group, 14.0 times faster at 4 MiB and up "
        "(interval 13.0 to 15.0), 21.0 times faster at 64 KiB and below (interval 18.9 to 23.1); "
        "on any tensor, 7.00 times faster at 4 MiB and up "
        "(interval 6.50 to 7.49), 21.0 times faster at 64 KiB and below (interval 18.9 to 23.1)."
    )
    assert four == (
        "4 ranks, float32, shm against gloo: on any tensor, 3.00 times faster at 64 KiB and below (interval 2.70 to 3.30)."
    )
    assert trust == "18 of 240 blocks were disturbed by other processes and do not count."


def test_sizes_in_between_are_told_where_there_are_no_others():
    only = {**ALLREDUCE, "rows": [calls(2, 1 << 20, 0.5)]}
    assert "on any tensor, 2.00 times slower between 64 KiB and 4 MiB (interval 1.82 to 2.22)." in verdict(only)


def test_an_interval_around_one_is_no_victory():
    only = {**ALLREDUCE, "rows": [calls(2, 4096, 1.05)]}
    said = verdict(only).splitlines()[0]
    assert "neither faster nor slower at 64 KiB and below (interval 0.945 to 1.16), as far as this shows." in said
    assert "times" not in said


def test_the_verdict_on_steps_is_a_mean_over_models_with_the_worst_of_them():
    two, four, _ = verdict(DDP).splitlines()
    assert two.startswith(
        "2 ranks: a training step takes 0.700 (0.650 to 0.749) of the time that it takes under torch's best setting"
    )
    assert "geometric mean of 2; the worst is resnet with sgd: 0.980 (0.882 to 1.08)" in two  # accumulation is no model
    assert "Synchronisation costs 0.100 of what it costs torch" in two
    assert "the worst is" not in four


def test_the_verdict_on_trainers_says_who_was_missing():
    one, two, _ = verdict(TRAINER).splitlines()
    assert "against a bare loop, the Trainer is 1.25 times slower (interval 1.24 to 1.26)" in one
    assert "against that of transformers, 2.50 times faster (interval 2.48 to 2.52)." in one
    assert "neither faster nor slower (interval 0.990 to 1.01)" in two
    alone = verdict({**TRAINER, "rows": [trained(1, 0.8, None)]})
    assert "transformers is not installed, so its Trainer is left out (pip install 'allstep[hf]')." in alone


def test_the_verdict_on_launchers_takes_the_bare_start_off():
    said = verdict(LAUNCH)
    assert "allstep launch adds 0.10 s to what two ranks need to start, torchrun --standalone 2.00 s: 0.050" in said
    assert "import allstep takes 20 ms and does not load torch." in said
    nothing = verdict({**LAUNCH, "own_cost_over_torchrun": None})
    assert "torchrun --standalone 2.00 s. Against" in nothing


def test_a_busy_machine_is_told():
    busy = copy.deepcopy(TRAINER)
    busy["rows"][0]["blocks"]["enough"] = False
    assert "too busy" in verdict(busy)
    assert "too busy" not in verdict(TRAINER)


def test_wrong_results_are_told_before_all_else():
    wrong = {**ALLREDUCE, "wrong": ["all_reduce of 4096 bytes: 1 of 1024 elements are wrong"]}
    assert "WRONG RESULTS, which make the times worthless: all_reduce of 4096 bytes: 1 of 1024" in verdict(wrong)


@pytest.mark.parametrize("name", RESULTS)
def test_tables_are_whole_and_their_columns_stand_below_one_another(name):
    drawn = [block.splitlines() for block in tables(RESULTS[name]).split("\n\n") if block.startswith("|")]
    assert drawn
    for lines in drawn:
        assert len({len(line) for line in lines}) == 1
        assert len({line.count("|") for line in lines}) == 1
    assert len(drawn[0]) == 2 + len(RESULTS[name]["rows"])


def test_a_table_has_text_on_the_left_and_numbers_on_the_right():
    assert table(["a", "bb"], [["x", "1"], ["long", "222"]]).splitlines() == [
        "| a    |  bb |",
        "|------|----:|",
        "| x    |   1 |",
        "| long | 222 |",
    ]


def test_what_was_not_measured_is_a_dash():
    (row,) = [line for line in tables(ALLREDUCE).splitlines() if line.startswith("| 4,")]
    assert row.count(" - ") == 4
    assert Estimate(**around(3.0)).value == 3.0
    assert "3.00 (2.70 to 3.30)" in row


@pytest.mark.parametrize("name", RESULTS)
def test_the_page_says_on_what_machine(name):
    page = markdown({**RESULTS[name], "verdict": "One.\nTwo."})
    assert page.startswith(f"# allstep bench {name}\n\n- One.\n- Two.\n\nAbacus, 2 cores, Linux x86_64;")
    assert page.endswith("\n")


@pytest.mark.parametrize(("nbytes", "text"), [(100, "100 B"), (4096, "4 KiB"), (25 << 20, "25 MiB"), (3 << 29, "1.5 GiB")])
def test_sizes_have_units(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize("name", RESULTS)
def test_a_picture_of_each(name, tmp_path):
    pytest.importorskip("matplotlib")
    picture.draw(RESULTS[name], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_where_little_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    picture.draw({**TRAINER, "rows": [trained(1, 0.8, None)]}, tmp_path / "picture.png")
    picture.draw({**ALLREDUCE, "rows": [calls(2, 4096, 1.0)]}, tmp_path / "other.png")
    assert (tmp_path / "picture.png").exists()
    assert (tmp_path / "other.png").exists()
