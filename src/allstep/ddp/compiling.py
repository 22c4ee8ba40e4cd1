"""torch.compile compiles the user's module, wherever it stands: around the wrapper, inside it, or around a whole step."""

import functools

__all__ = ["keep_engine_out_of_graphs"]


@functools.cache
def keep_engine_out_of_graphs() -> None:
    """Let torch.compile run the engine as it is; the module that it calls is compiled (test_compile.py).

    Collectives and hooks on tensors are no part of a graph: traced, they would break it in a dozen places, with warnings.
    """
    import torch._dynamo  # slow to import; every optimizer does so too

    for package in ("allstep.comm", "allstep.ddp"):
        torch._dynamo.trace_rules.add(package)
