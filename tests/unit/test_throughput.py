"""What a run says of its speed, and what it counts."""

import types

import pytest
import torch

from allstep.comm.communicator import SoloCommunicator
from allstep.comm.watchdog import HERE
from allstep.trainer import throughput as module
from allstep.trainer.state import TrainerState
from allstep.trainer.throughput import Speedometer, Work, device_peak, model_flops

CPU = torch.device("cpu")


class Two(SoloCommunicator):
    """This rank and another one that says something else."""

    def __init__(self, other):
        super().__init__()
        self.size, self.other = 2, other

    def all_gather_object(self, value):
        return [value, self.other]


class Clock:
    """Time that goes on where the test says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(HERE, "spent", {"data": 50.0})
        monkeypatch.setattr(HERE, "waited", 20.0)

    def advance(self, seconds, data=0.0, waits=0.0):
        self.now += seconds
        HERE.spent["data"] += data
        HERE.waited += waits


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def language_model():
    return torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10))


def ids(*rows):
    return {"input_ids": torch.tensor(rows)}


def test_rates_are_of_all_ranks_and_shares_are_means_without_pauses(clock):
    work = Work(language_model(), flops=lambda inputs: 1000.0)
    speed = Speedometer(work, Two((30, 0, 3000.0, 0.5, 0.1, 7 * 10**9, 0)), CPU, peak=100.0)
    state = TrainerState()
    work.add(ids([1, 2, 3]))
    with speed.paused():
        clock.advance(60, data=30, waits=10)
    clock.advance(10, data=1, waits=3)
    assert speed.logs(40, state) == {
        "samples_per_second": 4.0,
        "tokens_per_second": 3.3,
        "data_share": 0.3,
        "communication_share": 0.2,
        "model_flops_utilization": 2.0,
        "host_memory_peak_gb": 7.0,
    }
    assert state.total_flos == 4000.0
    clock.advance(1)
    work.add(ids([1]))
    assert speed.logs(2, state)["tokens_per_second"] == 31.0, "the next interval knows nothing of the one before"


def test_what_is_asked_for_in_between_counts_once(clock):
    work = Work(language_model(), "all", flops=lambda inputs: 5.0)
    speed, state = Speedometer(work, SoloCommunicator(), CPU), TrainerState()
    for _ in range(3):
        work.add(ids([1, 2], [3, 4]))
        speed.gather(state)  # a checkpoint
    clock.advance(2)
    logs = speed.logs(6, state)
    assert logs["tokens_per_second"] == 6.0
    assert (state.num_input_tokens_seen, state.total_flos) == (12, 15.0)
    assert not {"communication_share", "model_flops_utilization", "device_memory_peak_gb"} & logs.keys()


def test_an_interval_without_time_divides_by_nothing(clock):
    speed = Speedometer(Work(language_model()), SoloCommunicator(), CPU)
    assert speed.logs(0, TrainerState())["samples_per_second"] == 0


MASKED = {"input_ids": torch.tensor([[5, 6, 0], [7, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 0]])}


@pytest.mark.parametrize(
    ("counts", "inputs", "padding", "expected"),
    [
        ("no", MASKED, 0, (6, 0)),
        ("all", MASKED, 0, (6, 6)),
        ("non_padding", MASKED, 0, (6, 4)),
        ("non_padding", {"input_ids": MASKED["input_ids"]}, 0, (6, 3)),
        ("non_padding", {"input_ids": MASKED["input_ids"]}, None, (6, 6)),
        ("all", {"x": torch.zeros(3)}, None, (0, 0)),
        ("all", torch.zeros(3), None, (0, 0)),
    ],
)
def test_tokens_are_counted_as_transformers_counts_them(counts, inputs, padding, expected):
    work = Work(language_model(), counts, padding)
    work.add(inputs)
    assert work.take()[:2] == expected
    assert work.take() == (0, 0, 0.0)


def test_the_main_input_may_be_no_tokens():
    model = language_model()
    model.main_input_name = "pixels"
    work = Work(model, "all", flops=model_flops(model))
    work.add({"pixels": torch.zeros(2, 3)})
    assert work.take() == (0, 6, 6.0 * 50 * 6)


def test_operations_are_six_for_each_token_and_weight_that_is_no_embedding():
    model = language_model()
    assert model_flops(model)(ids([1, 2, 3])) == 6 * 3 * 50
    assert model_flops(model)({"x": 1}) == 0
    model.floating_point_ops = lambda inputs: 17
    assert model_flops(model)(ids([1])) == 17


def test_operations_are_those_of_transformers_trainer():
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8))
    theirs = transformers.Trainer.floating_point_ops(types.SimpleNamespace(model=model), ids([1, 2, 3]))
    assert model_flops(model)(ids([1, 2, 3])) == theirs > 0


def test_a_cpu_has_no_peak_that_is_known():
    assert device_peak(CPU, bf16=True, fp16=False) is None
