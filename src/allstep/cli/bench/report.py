"""What was measured, for a person: tables in Markdown, and a verdict in words. Pure: a result in, text out."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from allstep.cli.bench.blocks import Estimate, geometric_mean, short

__all__ = ["KINDS", "is_quiet", "markdown", "size", "table", "tables", "verdict"]

LARGE, SMALL = 4 << 20, 64 << 10
"""Bytes from which on a call is large, and up to which it is small, in the verdict."""
LEAST_COST = 0.01
"""Below this, and below zero, a share of torch's cost is noise: it counts as this much in a geometric mean."""
KINDS = {"own": "tensors of the group", "any": "any tensor"}


def size(nbytes: int) -> str:
    """4096 → 4 KiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns stand below one another in a terminal too; the first is text, the others numbers."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def drawn(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return (
            "| " + " | ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]) + " |"
        )

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([drawn(lines[0]), rule, *(drawn(line) for line in lines[1:])])


def tables(result: dict[str, Any]) -> str:
    """The tables of one benchmark."""
    return _TABLES[result["benchmark"]](result)


def verdict(result: dict[str, Any]) -> str:
    """The result in a few lines of words, the last of which tells how far to trust it."""
    return "\n".join([*_VERDICTS[result["benchmark"]](result), _trust(result)])


def markdown(result: dict[str, Any]) -> str:
    """The page of one benchmark: verdict, machine, tables."""
    machine = result["machine"]
    on = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; Python {machine['python']}, "
        f"torch {result['torch']}, allstep {result['allstep']}; one thread a rank."
    )
    return f"# allstep bench {result['benchmark']}\n\n{_lines(result['verdict'])}\n\n{on}\n\n{tables(result)}\n"


def _lines(text: str) -> str:
    """Lines as a Markdown list."""
    return "\n".join(f"- {line}" for line in text.splitlines())


def _of(fields: dict[str, float] | None) -> Estimate | None:
    return None if fields is None else Estimate(**fields)


def _cell(fields: dict[str, float] | None) -> str:
    return "-" if fields is None else str(_of(fields))


def is_quiet(result: dict[str, Any]) -> bool:
    """Whether every side of every row has enough blocks that nobody disturbed."""
    return all(one["enough"] for one in _blocks(result))


def _blocks(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row["blocks"] for row in result["rows"] if "blocks" in row] or [result["blocks"]]


def _trust(result: dict[str, Any]) -> str:
    blocks = _blocks(result)
    measured, disturbed = (sum(one[key] for one in blocks) for key in ("measured", "disturbed"))
    said = f"{disturbed} of {measured} blocks were disturbed by other processes and do not count."
    if not is_quiet(result):
        said += " The machine was too busy for some rows, which rest on their least disturbed blocks: do not trust these."
    if result["wrong"]:
        return f"WRONG RESULTS, which make the times worthless: {'; '.join(result['wrong'])}. {said}"
    return said


def _times(one: Estimate, where: str = "") -> str:
    """How one side compares with another, where a number above 1 is faster: in words that hold for the whole interval."""
    within = f"{where} (interval {short(one.low)} to {short(one.high)})"
    if one.low > 1:
        return f"{short(one.value)} times faster{within}"
    if one.high < 1:
        return f"{short(1 / one.value)} times slower{where} (interval {short(1 / one.high)} to {short(1 / one.low)})"
    return f"neither faster nor slower{within}, as far as this shows"


def _some(rows: Iterable[dict[str, Any]], pick: Callable[[dict[str, Any]], dict[str, float] | None]) -> list[Estimate]:
    return [one for row in rows if (one := _of(pick(row))) is not None]


def _worlds(rows: Iterable[dict[str, Any]]) -> list[int]:
    return sorted({row["ranks"] for row in rows})


# all_reduce


def _allreduce_tables(result: dict[str, Any]) -> str:
    kinds = [kind for kind in KINDS if any(kind in row["speedup"] for row in result["rows"])]
    head = ["ranks, size, dtype", "gloo ms", "floor ms"]
    for kind in kinds:
        head += [f"{kind} ms", f"gloo / {kind}", "in a row", f"{kind} / floor"]
    rows = []
    for row in result["rows"]:
        cells = [f"{row['ranks']}, {size(row['bytes'])}, {row['dtype']}", short(row["ms"]["gloo"]), short(row["ms"]["floor"])]
        for kind in kinds:
            if kind not in row["speedup"]:
                cells += ["-"] * 4
                continue
            cells += [short(row["ms"][kind]), _cell(row["speedup"][kind])]
            cells += [short(row["speedup_in_a_row"][kind]["value"]), short(row["over_floor"][kind]["value"])]
        rows.append(cells)
    return (
        f"{table(head, rows)}\n\nMilliseconds of one call by itself, on new data, the ranks lined up before it; `in a row` is "
        f"the ratio where calls follow one another at once. own: {result['backend']} on tensors that the group allocated; any: "
        "on any tensor. floor: half an add and half a copy of private memory of that size. In brackets: 95 % intervals."
    )


def _allreduce_verdict(result: dict[str, Any]) -> list[str]:
    dtype = result["rows"][0]["dtype"]
    said = []
    for ranks in _worlds(result["rows"]):
        rows = [row for row in result["rows"] if (row["ranks"], row["dtype"]) == (ranks, dtype)]
        said.append(f"{ranks} ranks, {dtype}, {result['backend']} against gloo: {'; '.join(_by_class(rows))}.")
    return said


def _by_class(rows: list[dict[str, Any]]) -> list[str]:
    """A part of a sentence for each kind of tensor. Sizes in between are told only where there are no others."""
    classes = {
        f" at {size(LARGE)} and up": [row for row in rows if row["bytes"] >= LARGE],
        f" at {size(SMALL)} and below": [row for row in rows if row["bytes"] <= SMALL],
    }
    if not any(classes.values()):
        classes = {f" between {size(SMALL)} and {size(LARGE)}": rows}
    said = []
    for kind, name in KINDS.items():
        parts = []
        for where, some in classes.items():
            if found := [Estimate(**row["speedup"][kind]) for row in some if kind in row["speedup"]]:
                parts.append(_times(geometric_mean(found), where))
        if parts:
            said.append(f"on {name}, {', '.join(parts)}")
    return said


# training steps


def _ddp_tables(result: dict[str, Any]) -> str:
    name = result["backend"]
    head = ["ranks, model, optimizer", "no sync ms", f"ours on {name} ms", "torch's best ms", "ours / best", "on gloo / best"]
    head += ["sync cost", "ours / no sync", "weights", "torch's best setting"]
    rows = [
        [
            f"{row['ranks']}, {row['model']}, {row['optimizer']}"
            + (f", x{row['accumulation']}" if row["accumulation"] > 1 else ""),
            short(row["ms"]["no sync"]),
            short(row["ms"]["ours"]),
            short(row["ms"][row["best_torch"]]),
            _cell(row["over_best"]),
            short(row["gloo_over_best"]["value"]),
            _cell(row["sync_cost"]),
            _cell(row["over_no_sync"]),
            row["parameters"],
            row["best_torch"].removeprefix("torch "),
        ]
        for row in result["rows"]
    ]
    return (
        f"{table(head, rows)}\n\nBelow 1, ours is faster. Sync cost: (ours - no sync) / (best - no sync), `-` where torch's is "
        "below 1 % of a step. xN: accumulation over N micro-batches. In brackets: 95 % intervals.\n\n"
        + "\n".join(f"- {model}: {about}" for model, about in result["models"].items())
    )


def _ddp_verdict(result: dict[str, Any]) -> list[str]:
    said = []
    for ranks in _worlds(result["rows"]):
        rows = [row for row in result["rows"] if row["ranks"] == ranks]
        rows = [row for row in rows if row["accumulation"] == 1] or rows
        steps = _some(rows, lambda row: row["over_best"])
        gloo = _some(rows, lambda row: row["gloo_over_best"])
        worst = max(rows, key=lambda row: float(row["over_best"]["value"]))
        text = (
            f"{ranks} ranks: a training step takes {geometric_mean(steps)} of the time that it takes under torch's best setting"
        )
        if len(rows) > 1:
            text += f", geometric mean of {len(rows)}; the worst is {worst['model']} with {worst['optimizer']}: "
            text += _cell(worst["over_best"])
        costs = [max(one.value, LEAST_COST) for one in _some(rows, lambda row: row["sync_cost"])]
        if costs:
            mean = geometric_mean([Estimate(value=one, low=one, high=one) for one in costs]).value
            text += f". Synchronisation costs {short(mean)} of what it costs torch"
        said.append(f"{text}. On gloo, a step takes {geometric_mean(gloo)} of torch's.")
    return said


# Trainer


def _trainer_tables(result: dict[str, Any]) -> str:
    head = ["ranks", "allstep steps/s", "bare loop steps/s", "transformers steps/s", "ours / bare", "ours / transformers"]
    rows = []
    for row in result["rows"]:
        speeds = row["steps_per_second"]
        peer = f"{speeds['transformers']:.0f}" if "transformers" in speeds else "-"
        ratios = [_cell(row["over_bare"]), _cell(row["over_peer"])]
        rows.append([str(row["ranks"]), f"{speeds['allstep']:.0f}", f"{speeds['bare']:.0f}", peer, *ratios])
    return (
        f"{table(head, rows)}\n\nSteps per second of a tiny MLP, logging and saving off; the bare loop has torch's DDP where "
        "there are several ranks. In brackets: 95 % intervals over jobs."
    )


def _trainer_verdict(result: dict[str, Any]) -> list[str]:
    said = []
    for row in result["rows"]:
        bare, peer = _of(row["over_bare"]), _of(row["over_peer"])
        assert bare is not None
        text = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}: against a bare loop, the Trainer is {_times(bare)}"
        said.append(f"{text}; against that of transformers, {_times(peer)}." if peer else f"{text}.")
    if any(row["over_peer"] is None for row in result["rows"]):
        said.append("transformers is not installed, so its Trainer is left out (pip install 'allstep[hf]').")
    return said


# launcher


def _launch_tables(result: dict[str, Any]) -> str:
    rows = [[row["launcher"], short(row["seconds"])] for row in result["rows"]]
    imports = [
        [f"import {name}", f"{one['ms']:.0f}", "yes" if one["loads_torch"] else "no"] for name, one in result["imports"].items()
    ]
    return (
        f"{table(['2 ranks', 'seconds to the first all_reduce'], rows)}\n\n{table(['', 'ms', 'loads torch'], imports)}\n\n"
        "Bare processes have no launcher: what torch itself needs to start, to join and to reduce."
    )


def _launch_verdict(result: dict[str, Any]) -> list[str]:
    seconds = {row["launcher"]: row["seconds"] for row in result["rows"]}
    bare, best = seconds["bare processes"], result["best_torchrun"]
    share, whole, own = _of(result["own_cost_over_torchrun"]), _of(result["over_torchrun"]), result["imports"]["allstep"]
    assert whole is not None
    ours, theirs = seconds["allstep launch"] - bare, seconds[best] - bare
    text = f"allstep launch adds {ours:.2f} s to what two ranks need to start, {best} {theirs:.2f} s"
    text += f": {share} of it" if share is not None else ""
    loads = "loads torch" if own["loads_torch"] else "does not load torch"
    return [
        f"{text}. Against {best}, the whole start is {_times(whole.inverse())}.",
        f"import allstep takes {own['ms']:.0f} ms and {loads}.",
    ]


_TABLES = {"allreduce": _allreduce_tables, "ddp": _ddp_tables, "trainer": _trainer_tables, "launch": _launch_tables}
_VERDICTS = {"allreduce": _allreduce_verdict, "ddp": _ddp_verdict, "trainer": _trainer_verdict, "launch": _launch_verdict}
