"""How many floating-point operations a second a device can do at most, by its name: what a model's share is taken of."""

import re
from collections.abc import Mapping

__all__ = ["PEAKS", "peak_flops"]

PEAKS: Mapping[str, tuple[float | None, float | None, float | None, float]] = {
    # words of the name: bf16, fp16, TF32, fp32; teraFLOP/s, dense (makers' tables double them for sparse matrices)
    # NVIDIA's data sheets of each product; tensor cores with fp32 sums, fp32 outside of them
    "V100": (None, 125.0, None, 15.7),
    "T4": (None, 65.0, None, 8.1),
    "A10": (125.0, 125.0, 62.5, 31.2),
    "A30": (165.0, 165.0, 82.0, 10.3),
    "A40": (149.7, 149.7, 74.8, 37.4),
    "A100": (312.0, 312.0, 156.0, 19.5),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7),
    "L4": (121.0, 121.0, 60.0, 30.3),
    "L40": (181.0, 181.0, 90.5, 90.5),
    "L40S": (362.0, 362.0, 183.0, 91.6),
    "H100": (989.4, 989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 756.0, 378.0, 51.0),
    "H100 NVL": (835.0, 835.0, 417.5, 60.0),
    "H200": (989.4, 989.4, 494.7, 66.9),
    "H200 NVL": (835.0, 835.0, 417.5, 60.0),
    "B200": (2250.0, 2250.0, 1125.0, 75.0),
    # NVIDIA's white papers on the Ampere and Ada architectures, fp16 and bf16 with fp32 sums
    "RTX 3090": (71.0, 71.0, 35.6, 35.6),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "RTX 6000 Ada": (364.2, 364.2, 182.1, 91.1),
    # AMD's data sheets; each half of an MI250X is a device of its own
    "MI250X": (191.5, 191.5, None, 47.9),
    "MI300X": (1307.4, 1307.4, 653.7, 163.4),
    "MI325X": (1307.4, 1307.4, 653.7, 163.4),
}
"""Words of a device's name -> its peaks; None where it has no unit for that kind of number."""

_KINDS = ("bf16", "fp16", "tf32", "fp32")


def peak_flops(device_name: str, kind: str) -> float | None:
    """Floating-point operations a second that a device can do at most; None where it is not known.

    Args:
        device_name: as torch gives it: "NVIDIA H100 80GB HBM3".
        kind: of the products in matrix multiplications: bf16, fp16, tf32 or fp32.
    """
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    known = [name for name in PEAKS if set(name.split()) <= words]
    if not known or "Laptop" in words:
        return None
    peak = PEAKS[max(known, key=lambda name: len(name.split()))][_KINDS.index(kind)]
    return None if peak is None else peak * 1e12
