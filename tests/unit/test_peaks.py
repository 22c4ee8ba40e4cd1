"""What devices can do at most, by their names."""

import pytest

from allstep.report.peaks import PEAKS, peak_flops


@pytest.mark.parametrize(
    ("name", "kind", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A10", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("Somebody's A1000", "bf16", None),
    ],
)
def test_peaks_are_found_by_the_words_of_a_name(name, kind, tera):
    assert peak_flops(name, kind) == (None if tera is None else tera * 1e12)


def test_smaller_numbers_are_no_slower():
    for bf16, fp16, tf32, fp32 in PEAKS.values():
        known = [each for each in (bf16, fp16, tf32, fp32) if each is not None]
        assert known == sorted(known, reverse=True)
