"""Train a small causal language model with softmax and with entmax, from the same seed.

Both read the same bytes of Shakespeare in the same order; only the regulariser of their attention
differs. The script prints the loss on text that was not seen, the time a step, how many bytes a
byte attends to, and what each model writes. Without the data, words of examples/sentences.txt in
random order are the text.

    python examples/06_sparse_language_model.py
"""

from __future__ import annotations

import statistics
import time
from random import Random

import torch
from _data import ROOT, add_data, add_steps, found, parser, steps_of, track
from torch import Tensor, nn

import fenchel as fl

WIDTH, HEADS, LAYERS, LENGTH = 128, 4, 3, 128
FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)  # which bytes may not be seen


class Writer(nn.Module):
    """Bytes (batch, token) -> logits of the next byte (batch, token, 256)."""

    def __init__(self, omega: fl.Regularizer) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        kinds = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        blocks = (
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **kinds) for _ in range(LAYERS)
        )
        self.blocks = fl.nn.convert(nn.ModuleList(blocks), omega)  # torch's layers, our attention
        self.leave = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: Tensor) -> Tensor:
        return self.leave(self.states(text)[-1])

    def states(self, text: Tensor) -> list[Tensor]:
        """What each block is given, and what the last one makes: (batch, token, WIDTH)."""
        n = text.shape[1]
        made = [self.letter(text) + self.place.weight[:n]]
        for block in self.blocks:
            made.append(block(made[-1], FUTURE[:n, :n], is_causal=True))
        return made

    @torch.no_grad()
    def keys(self, text: Tensor) -> str:
        """How many bytes a byte attends to in each layer, in the mean over heads and places."""
        counts = []
        for block, x in zip(self.blocks, self.states(text), strict=False):
            x = block.norm1(x)
            weights = block.self_attn(x, x, x, attn_mask=FUTURE, average_attn_weights=False)[1]
            counts.append((weights > 0).double().sum(-1).mean())
        return " ".join(f"{count:5.1f}" for count in counts)

    @torch.no_grad()
    def write(self, start: str, count: int) -> str:
        text = torch.tensor([list(start.encode())])
        for _ in range(count):
            p = (self(text[:, -LENGTH:])[:, -1] / 0.7).softmax(-1)
            text = torch.cat([text, torch.multinomial(p, 1)], 1)
        return bytes(text[0].tolist()).decode(errors="replace")


def loss(model: Writer, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train(models: dict[str, Writer], windows: Tensor, steps: int) -> dict[str, float]:
    """In turn, on the same batches, so that a busy machine slows both; median seconds a step."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    made = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    for step in track(range(steps), "both models"):
        batch = windows[torch.randint(len(windows), (16,))]
        for name, optimizer in made.items():
            begin = time.perf_counter()
            optimizer.param_groups[0]["lr"] = (
                3e-3 * min(1.0, 10 * step / steps) * (1 - step / steps)
            )
            optimizer.zero_grad()
            loss(models[name], batch).backward()
            optimizer.step()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/06_sparse_language_model.py --steps 100")
    add_steps(options, usual=300, quick=15)
    add_data(options)
    args = options.parse_args(argv)
    file, models = args.data / "text" / "tinyshakespeare.txt", {}
    if found(file, "a text of random words"):
        text = file.read_bytes()
    else:
        words = (ROOT / "examples" / "sentences.txt").read_bytes().split()
        text = b" ".join(Random(args.seed).choices(words, k=50_000))
    windows = torch.tensor(list(text)).unfold(0, LENGTH + 1, 1)
    edge = len(windows) * 9 // 10
    new = windows[edge + LENGTH :: len(windows) // 500]  # no byte of it is trained on
    for name, omega in {"softmax": fl.Shannon(), "entmax-1.5": fl.Tsallis(1.5)}.items():
        torch.manual_seed(args.seed)
        models[name] = Writer(omega)
    seconds = train(models, windows[:edge], steps_of(args))
    print(f"{new.numel()} bytes not seen   loss a byte   ms a step   keys in each layer, of 64.5")
    lines = []
    for name, model in models.items():
        with torch.no_grad():
            final = loss(model, new)
        print(f"{name:<22}{final:>14.3f}{1000 * seconds[name]:>12.0f}   {model.keys(new[:8, 1:])}")
        torch.manual_seed(args.seed)
        lines.append(f"{name} writes: {model.write('The ', 60)!r}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
