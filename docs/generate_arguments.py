"""Writes docs/arguments.md, and the tables of docs/migrating.md, from the source of TrainingArguments.

    python docs/generate_arguments.py

A test holds the pages to what this would write (tests/unit/test_generated_pages.py).
"""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

from allstep._arguments.choices import OPTIMIZERS, OPTIMIZERS_OF_LIBRARIES, OPTIMIZERS_REFUSED
from allstep._arguments.old_names import OLD_NAMES
from allstep._arguments.run_fields import RunFields
from allstep._arguments.sentences import sentences_under_fields
from allstep._arguments.standing import NOTHING_TO_DO, OURS, REFUSED
from allstep._arguments.training_fields import TrainingFields
from allstep.arguments import TrainingArguments

DOCS = Path(__file__).parent

BETTER = {
    "per_device_eval_batch_size": "never changes a metric: every sample counts once, on any number of ranks",
    "gradient_accumulation_steps": "a window that the end of an epoch cuts short is a step of its own, also for streams",
    "auto_find_batch_size": "all ranks shrink their micro-batches together, and the global batch stays the same",
    "bf16_full_eval": "evaluations during training are cast too, and training goes on with the same bits",
    "fp16_full_eval": "evaluations during training are cast too, and training goes on with the same bits",
    "fp16": "all ranks share one loss scale, and leave out the same steps",
    "seed": "randomness belongs to the sample: ranks draw different dropout masks, and a resumed run the same ones",
    "use_cpu": "not needed where there is no accelerator",
    "ddp_find_unused_parameters": "None works for every model, without walking the graph in each step",
    "ddp_bucket_cap_mb": "None plans the buckets from measured times",
    "ddp_backend": "shm as well: CPU ranks of one host share memory",
    "ddp_timeout": "also on the CPU; the error names the late rank, and where it is",
    "disable_tqdm": "None shows a bar where there is a terminal, and one line an event elsewhere",
    "save_strategy": "a checkpoint is whole or not there; resuming works on another number of ranks",
    "ignore_data_skip": "without it a run goes on behind the last sample used, on any number of ranks",
    "dataloader_drop_last": "without it the last samples of an epoch are used once each, none is repeated",
}
"""Argument → what is done better here than in Hugging Face's Trainer."""


def arguments_page() -> str:
    """docs/arguments.md: every argument, under the headings of the source."""
    lines = [
        "# All arguments",
        "",
        "Made from the source by `docs/generate_arguments.py`. Each is a field of `allstep.TrainingArguments`, and an option",
        "of a script that uses `allstep.ArgumentParser`. What is different from Hugging Face's: [Moving over](migrating.md).",
    ]
    for heading, fields in _groups():
        lines += [
            "",
            f"## {heading[0].upper()}{heading[1:]}",
            "",
            "| argument | type | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [f"| `{name}` | `{kind}` | `{default}` | {sentence} |" for name, kind, default, sentence in fields]
    return "\n".join(lines) + "\n"


def standing_table() -> str:
    """How each of Hugging Face's arguments stands here."""
    lines = ["| argument | here | |", "|---|---|---|"]
    for name in sorted(each.name for each in dataclasses.fields(TrainingArguments)):
        if name in REFUSED:
            lines.append(f"| `{name}` | not supported | only `{REFUSED[name].harmless[0]}`, as {REFUSED[name].why} |")
        elif name in NOTHING_TO_DO:
            lines.append(f"| `{name}` | accepted, nothing to do | {NOTHING_TO_DO[name]} |")
        elif name in BETTER:
            lines.append(f"| `{name}` | better | {BETTER[name]} |")
        elif name not in OURS:
            lines.append(f"| `{name}` | same | |")
    return "\n".join(lines) + "\n"


def optimizers_table() -> str:
    """How each value of `optim` stands here."""
    lines = ["| `optim` | |", "|---|---|"]
    lines += [f"| `{name}` | same |" for name in sorted(OPTIMIZERS) if name not in OPTIMIZERS_OF_LIBRARIES]
    lines += [f"| `{name}` | with `{package}` installed |" for name, package in sorted(OPTIMIZERS_OF_LIBRARIES.items())]
    lines += [f"| `{name}` | not supported: {why} |" for name, why in sorted(OPTIMIZERS_REFUSED.items())]
    return "\n".join(lines) + "\n"


def old_names_table() -> str:
    """What became of arguments of earlier versions."""
    lines = ["| earlier | now |", "|---|---|"]
    for name, old in sorted(OLD_NAMES.items()):
        refused = f"; a value that is not {old.expected} is an error" if old.expected.startswith("a ") else ""
        refused = "; a value that asks for something is an error" if old.expected == "nothing" else refused
        lines.append(f"| `{name}` | {old.advice}{refused} |")
    return "\n".join(lines) + "\n"


def migrating_page(text: str) -> str:
    """docs/migrating.md with its tables made anew; the prose around them stays."""
    for name, table in (("arguments", standing_table()), ("optim", optimizers_table()), ("earlier", old_names_table())):
        begin, end = f"<!-- {name}: made by docs/generate_arguments.py -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        assert found, f"docs/migrating.md has lost the line {begin}"
        assert closed, f"docs/migrating.md has lost the line {end}"
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def _groups() -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """(heading, [(name, type, default, sentence)]) in the order of the source."""
    sentences = sentences_under_fields(TrainingArguments)
    for cls in (TrainingFields, RunFields):
        source = inspect.getsource(cls)
        lines = source.splitlines()
        (body,) = ast.parse(source).body
        fields: list[tuple[str, str, str, str]] = []
        heading, last = "where", 0
        for node in (each for each in body.body if isinstance(each, ast.AnnAssign) and each.target.id != "_"):
            found = [line for line in lines[last : node.lineno - 1] if line.startswith("    # ---- ")]
            if found:
                if fields:
                    yield heading, fields
                heading, fields = found[-1].removeprefix("    # ---- "), []
            last = node.lineno
            name = node.target.id
            kind = ast.unparse(node.annotation).replace("|", "\\|")
            fields.append((name, kind, _default(node.value, source), " ".join(sentences[name].split()).replace("|", "\\|")))
        yield heading, fields


def _default(value: ast.expr | None, source: str) -> str:
    """What the source says, or the default inside of `field(...)`."""
    if isinstance(value, ast.Call):
        (value,) = [word.value for word in value.keywords if word.arg in ("default", "default_factory")]
    said = "" if value is None else ast.get_source_segment(source, value)
    return "[]" if said == "list" else str(said)


def main() -> None:
    """Write both pages."""
    (DOCS / "arguments.md").write_text(arguments_page(), encoding="utf-8")
    migrating = DOCS / "migrating.md"
    migrating.write_text(migrating_page(migrating.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
