"""A small GPT learns to write Python: one page, two ranks, about a minute.

    allstep launch --num_processes 2 examples/train_gpt.py
    torchrun --nproc_per_node 2 examples/train_gpt.py
    accelerate launch --multi_gpu --num_processes 2 examples/train_gpt.py
    python examples/train_gpt.py

It reads bytes: the source of Python's own standard library, which every machine has. Nothing is downloaded. Every
argument of TrainingArguments is an option, such as --max_steps 2000 or --bf16; --help lists them.
"""

import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, relu, scaled_dot_product_attention

from allstep import ArgumentParser, Trainer, TrainingArguments

CONTEXT = 128  # bytes that the model sees at once
LOOK_BACK = 4  # bytes whose embeddings make up a position: its own and those just before it


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A text cut into windows of CONTEXT bytes; the labels are the same bytes, one further on."""

    def __init__(self, text: bytes, at_most: int | None = None) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # (bytes of the text,)
        starts = range(0, len(text) - CONTEXT, CONTEXT)
        self.starts = starts[:: math.ceil(len(starts) / at_most)] if at_most else starts  # spread over the whole text

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.bytes[self.starts[index] :][: CONTEXT + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


def read_standard_library() -> tuple[bytes, bytes]:
    """(text to train on, text held out): the modules of this Python, one file in twenty held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    files = [path for path in sorted(root.rglob("*.py")) if not left_out.intersection(path.relative_to(root).parts)]
    training = b"".join(path.read_bytes() for index, path in enumerate(files) if index % 20 != 0)
    return training, b"".join(path.read_bytes() for path in files[::20])


class Block(nn.Module):
    """Attention, then two layers at each position; each adds to what it was given."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.feed_out(relu(self.feed_in(self.feed_norm(x))).square()))


class GPT(nn.Module):
    """Predicts each next byte of a text from the bytes before it; 2.5 million parameters as it stands."""

    def __init__(self, width: int = 256, blocks: int = 3, heads: int = 4, dropout: float = 0.02) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(256, width // LOOK_BACK)
        self.position_embedding = nn.Embedding(CONTEXT, width)
        self.embedding_norm, self.head_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """`input_ids` and `labels`: (batch, length). The loss is in nats per byte; logits are (batch, length, 256)."""
        length = input_ids.shape[1]
        embedded = self.byte_embedding(input_ids)
        # A position begins with the last few bytes side by side, so that the blocks need not learn to look at them.
        x = torch.cat([pad(embedded, (0, 0, back, 0))[:, :length] for back in range(LOOK_BACK)], dim=-1)
        x = self.embedding_norm(x + self.position_embedding.weight[:length])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.head_norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@torch.inference_mode()
def write(model: GPT, prompt: bytes, length: int, temperature: float = 0.8) -> str:
    """`length` more bytes after `prompt`, each drawn from what the model predicts."""
    model.eval()
    text = torch.tensor([list(prompt)], device=model.head.weight.device)  # (1, bytes so far)
    for _ in range(length):
        logits = model(text[:, -CONTEXT:])["logits"][0, -1].float()
        text = torch.cat([text, torch.multinomial((logits / temperature).softmax(-1), 1)[None]], dim=1)
    written = bytes(text[0].tolist()).decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in written)


def draw(history: list[dict[str, Any]], path: Path) -> None:
    """The loss over the steps, on training and held-out text, as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} was not drawn: matplotlib is missing; pip install matplotlib")
        return
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for key, name in (("loss", "training"), ("eval_loss", "held out")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        axes.plot(*zip(*points, strict=True), label=name, marker="." if key == "loss" else "o")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", ylim=(1, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"The loss curve is in {path}")


def main() -> None:
    parser = ArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="outputs/train_gpt", max_steps=450, per_device_train_batch_size=4, per_device_eval_batch_size=16,
        learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=20, weight_decay=0.1, adam_beta2=0.98,
        logging_steps=25, eval_strategy="steps", eval_steps=75, save_steps=225, save_total_limit=2,
    )  # fmt: skip
    (args,) = parser.parse_args_into_dataclasses()

    torch.manual_seed(args.seed)  # every way to start begins with the same weights
    model = GPT()
    training, held_out = read_standard_library()
    trainer = Trainer(model=model, args=args, train_dataset=Windows(training), eval_dataset=Windows(held_out, at_most=128))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]

    if trainer.is_world_process_zero():
        print(f"Validation loss: {before:.3f} before, {after:.3f} after (nats per byte; a uniform guess costs 5.545)")
        draw([{"step": 0, "eval_loss": before}, *trainer.state.log_history], Path(args.output_dir) / "loss.png")
        print(write(model, b"def main(", length=300))


if __name__ == "__main__":
    main()
