"""What starters other than torchrun and its like leave in the environment, and which processes are above this one."""
