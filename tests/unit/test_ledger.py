"""The ledger holds what each step was made of, on all ranks, bit for bit, each step once."""

import json

import pytest
import torch

from allstep.report.ledger import Ledger, cut_ledger, read_ledger, samples_by_epoch

FACTS = {"world_size": 2, "threads": 1, "block": 2, "in_order": True}


def write(folder, rank, steps, digest_steps=0, with_rows=False, loss=0.1):
    ledger = Ledger(folder, rank, FACTS, digest_steps=digest_steps, with_rows=with_rows)
    for step in steps:
        for number in (2 * rank, 2 * rank + 1):
            samples = [8 * (step - 1) + 2 * number, 8 * (step - 1) + 2 * number + 1]
            inputs = {"x": torch.tensor(samples).float(), "scale": torch.ones(())}
            ledger.note(number, samples, 2, torch.tensor(loss * number), inputs)
        if ledger.is_due(step):
            ledger.note_tensors("gradients", [("w", torch.ones(3)), ("frozen", None)])
        numbers = {"loss": torch.tensor(loss), "weight": torch.tensor(8.0), "grad_norm": None}
        ledger.end_step(step, 0, learning_rate=1e-3, **numbers)
    return ledger


def test_what_two_ranks_wrote_is_read_as_one_step_in_grid_order(tmp_path):
    cut_ledger(tmp_path / "ledger", 0)
    for rank in (1, 0):
        write(tmp_path / "ledger", rank, [1, 2], digest_steps=2, with_rows=True).close()
    steps = read_ledger(tmp_path / "ledger")
    assert list(steps) == [1, 2]
    first, second = steps.values()
    assert [each.number for each in first.micro_batches] == [0, 1, 2, 3]
    assert [each.samples for each in first.micro_batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert first.micro_batches[3].loss == torch.tensor(0.1 * 3).item()  # to the bit
    assert len({row for each in first.micro_batches for row in each.rows}) == 8
    assert (first.gradients, list(second.gradients)) == ({}, ["w"])
    assert (first.world_size, first.loss, first.grad_norm, first.ranks_differ) == (2, torch.tensor(0.1).item(), None, [])
    assert samples_by_epoch(steps.values()) == {0: dict.fromkeys(range(16), 1)}


def test_what_ranks_do_not_agree_on_is_named(tmp_path):
    write(tmp_path, 0, [1]).close()
    write(tmp_path, 1, [1], loss=0.2).close()
    assert read_ledger(tmp_path)[1].ranks_differ == ["loss"]


def test_steps_that_are_done_again_are_dropped_on_all_ranks(tmp_path):
    for rank in (0, 1):
        write(tmp_path, rank, [1, 2, 3]).close()
    cut_ledger(tmp_path, 2)
    assert list(read_ledger(tmp_path)) == [1, 2]
    write(tmp_path, 0, [3]).close()
    assert list(read_ledger(tmp_path)) == [1, 2]  # rank 1 has not written step 3
    write(tmp_path, 1, [3]).close()
    assert list(read_ledger(tmp_path)) == [1, 2, 3]


def test_a_run_from_the_beginning_keeps_the_ledger_of_another_one(tmp_path):
    folder = tmp_path / "ledger"
    for last in (3, 2):
        cut_ledger(folder, 0)
        for rank in (0, 1):
            write(folder, rank, range(1, last + 1)).close()
    assert list(read_ledger(folder)) == [1, 2]
    assert list(read_ledger(tmp_path / "ledger.previous")) == [1, 2, 3]


def test_a_line_that_was_cut_off_counts_as_not_written(tmp_path):
    for rank in (0, 1):
        write(tmp_path, rank, [1, 2]).close()
    text = (tmp_path / "rank_1.jsonl").read_text()
    (tmp_path / "rank_1.jsonl").write_text(text[:-20])
    assert list(read_ledger(tmp_path)) == [1]
    cut_ledger(tmp_path, 2)
    assert len((tmp_path / "rank_1.jsonl").read_text().splitlines()) == 1


def test_numbers_are_read_late_and_those_that_are_not_finite_come_back(tmp_path):
    ledger = write(tmp_path, 0, range(1, 16), loss=float("nan"))
    assert (tmp_path / "rank_0.jsonl").read_text() == ""
    ledger.settle()
    assert len((tmp_path / "rank_0.jsonl").read_text().splitlines()) == 15
    ledger.close()
    write(tmp_path, 1, range(1, 16), loss=float("inf")).close()
    step = read_ledger(tmp_path)[4]
    assert step.loss != step.loss
    assert step.micro_batches[1].loss != step.micro_batches[1].loss
    assert step.micro_batches[3].loss == float("inf")


class Full:
    def writelines(self, lines):
        raise OSError(28, "No space left on device")

    def close(self):
        return None


def test_a_full_disk_ends_the_ledger_and_not_the_training(tmp_path):
    ledger = write(tmp_path, 0, [1])
    ledger._file.close()
    ledger._file = Full()
    with pytest.warns(UserWarning, match="rank_0.jsonl ends here: .*No space left on device. Training goes on."):
        ledger.settle()
    ledger.end_step(2, 0, loss=torch.tensor(1.0), weight=torch.tensor(1.0), grad_norm=None, learning_rate=1.0)
    ledger.close()


def test_no_ledger_says_what_to_write(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no ledger.*Train with ledger=True"):
        read_ledger(tmp_path)


def test_each_line_is_plain_json(tmp_path):
    write(tmp_path, 0, [1], digest_steps=1).close()
    line = json.loads((tmp_path / "rank_0.jsonl").read_text())
    assert (line["step"], line["threads"], line["learning_rate"]) == (1, 1, 1e-3)
    assert line["micro_batches"][0] == {"number": 0, "samples": [0, 1], "weight": 2, "loss": 0.0}
