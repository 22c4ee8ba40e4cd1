"""What runs in the ranks of a benchmark. Only here does `allstep bench` import torch and call torch.distributed."""
