import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.report.metrics import (
    Throughput,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_rate,
)


def test_throughput_is_items_over_seconds_of_the_window() -> None:
    throughput = Throughput(window=3)
    assert throughput.rate is None
    throughput.mark(0.0)
    assert throughput.rate is None
    throughput.mark(10.0, 10)
    assert throughput.rate == 1.0
    throughput.mark(11.0, 100)
    throughput.mark(12.0, 100)
    assert throughput.rate == 100.0, "the slow first step is out of the window"


@given(st.floats(0.1, 1e3), st.floats(0.1, 1e3), st.integers(2, 30), st.integers(2, 60))
def test_a_steady_pace_is_shown_as_it_is(seconds: float, items: float, window: int, marks: int) -> None:
    throughput = Throughput(window)
    for number in range(marks):
        throughput.mark(number * seconds, items if number else 0)
    assert throughput.rate == pytest.approx(items / seconds)


def test_a_clock_that_runs_backwards_is_refused_and_one_that_stands_still_has_no_rate() -> None:
    throughput = Throughput()
    throughput.mark(5.0)
    throughput.mark(5.0, 10)
    assert throughput.rate is None
    with pytest.raises(ValueError, match=r"runs backwards: 4\.0 s after 5\.0 s"):
        throughput.mark(4.0, 10)
    throughput.mark(6.0, 10)
    assert throughput.rate == 20.0, "the refused mark left no trace"
    with pytest.raises(ValueError, match="window of 1"):
        Throughput(window=1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.21456, "3.215"),
        (0.0123456, "0.01235"),
        (5e-5, "5e-05"),
        (4.1667e-4, "4.167e-04"),
        (0, "0"),
        (0.0, "0"),
        (1.0, "1"),
        (12, "12"),
        (12340.0, "12340"),
        (999.96, "1000"),
        (123456.7, "123457"),
        (2.5e7, "2.5e+07"),
        (-0.5, "-0.5000"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.floats(-1e300, 1e300))
def test_a_short_number_is_near_the_number(value: float) -> None:
    assert float(format_number(value)) == pytest.approx(value, rel=1e-3)


def test_figures_have_units() -> None:
    assert [format_rate(value, "samples") for value in (12345.6, 812.3, 9.44, 0.0123)] == [
        "12,346 samples/s",
        "812 samples/s",
        "9.4 samples/s",
        "0.012 samples/s",
    ]
    assert [format_bytes(value) for value in (0, 512, 1500, 25_200_000, 999_950, 3.1e9, 4.2e12)] == [
        "0 B",
        "512 B",
        "1.5 kB",
        "25.2 MB",
        "1.0 MB",
        "3.1 GB",
        "4.2 TB",
    ]
    assert [format_duration(value) for value in (0, 67.9, 3600, 96000)] == ["0:00:00", "0:01:07", "1:00:00", "26:40:00"]
    assert format_count(12345) == "12,345"
