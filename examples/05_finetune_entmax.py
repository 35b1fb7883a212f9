"""Fine-tune a softmax model to entmax, with its quality before the swap, at it, and after.

MiniLM with a linear head learns the sentiment of sentences (SST-2) under softmax. One copy is then
swapped to entmax-1.5 and trained for as many steps again; the control is a copy that stays on
softmax, for the same steps on the same batches. With --quick, or without the model or the data, a
tiny BERT learns generated sentences from scratch instead.

    python examples/05_finetune_entmax.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from _data import add_data, add_model, add_steps, found, parser, steps_of, track
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import fenchel as fl
from fenchel import hf, lens

Data = tuple[Tensor, Tensor, Tensor]  # ids (text, token), 1 where no padding is, labels (text,)


class Classifier(nn.Module):
    def __init__(self, body: Any, rate: float, batch: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(body.config.hidden_size, 2)
        self.rate, self.batch = rate, batch  # of training

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        hidden = self.body(ids, seen).last_hidden_state
        return self.head((hidden * seen.unsqueeze(-1)).sum(1) / seen.sum(1, keepdim=True))


def real(file: Path, tokenizer: Any) -> Data:
    """Of SST-2, each cut to 32 tokens."""
    rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()]
    made = tokenizer([text for text, _ in rows], padding=True, truncation=True, max_length=32)
    labels = torch.tensor([int(label) for _, label in rows])
    return torch.tensor(made["input_ids"]), torch.tensor(made["attention_mask"]), labels


def generated(count: int) -> Data:
    """16 words: one of 1 to 20 pleases or of 21 to 40 does not; 41 before it turns it round."""
    ids, rows = torch.randint(42, 100, (count, 16)), torch.arange(count)
    word, place = torch.randint(1, 41, (count,)), torch.randint(1, 16, (count,))
    turned = torch.rand(count) < 0.3
    ids[rows, place] = word
    ids[rows[turned], place[turned] - 1] = 41
    return ids, torch.ones_like(ids), ((word <= 20) ^ turned).long()


def cut(data: Data, batch: Tensor) -> Data:
    """The batch without what is padding in all of it."""
    ids, seen, labels = (x[batch] for x in data)
    return ids[:, : seen.sum(1).max()], seen[:, : seen.sum(1).max()], labels


def train(model: Classifier, data: Data, steps: int, seed: int, name: str) -> None:
    torch.manual_seed(seed)  # the same batches for every copy
    optimizer = torch.optim.AdamW(model.parameters(), model.rate)
    for _ in track(range(steps), name):
        ids, seen, labels = cut(data, torch.randint(len(data[0]), (model.batch,)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids, seen), labels).backward()
        optimizer.step()


@torch.no_grad()
def report(name: str, model: Classifier, data: Data) -> None:
    right = 0
    for batch in track(data[1].sum(1).argsort().split(64), "test"):  # alike in length
        ids, seen, labels = cut(data, batch)
        right += int((model(ids, seen).argmax(-1) == labels).sum())
    full = seen.all(1)  # of the last batch, the longest texts: they have no padding
    weights = torch.stack(model.body(ids[full], seen[full], output_attentions=True).attentions)
    zeros = (weights == 0).double().mean()
    print(f"{name:<28}{right / len(data[0]):>13.1%}{zeros:>15.1%}")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/05_finetune_entmax.py --steps 100 --seed 1")
    add_steps(options, usual=150, quick=120)
    add_model(options)
    add_data(options)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    files = [args.data / "text" / f"sst2.{part}.tsv" for part in ("train", "dev")]
    tiny = "a tiny BERT on generated sentences"
    if not args.quick and all(found(path, tiny) for path in (files[0], args.model)):
        body, tokenizer = lens.load(args.model)
        body.embeddings.requires_grad_(False)  # half of all weights, and not the question here
        known, new = (real(file, tokenizer) for file in files)
        model = Classifier(body, rate=5e-5, batch=8)
    else:
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        body = BertModel(BertConfig(vocab_size=100, intermediate_size=128, **sizes)).eval()
        known, new = generated(4_000), generated(1_000)
        model = Classifier(body, rate=1e-3, batch=32)
    steps, softmax, entmax = steps_of(args), fl.Shannon(), fl.Tsallis(1.5)
    train(hf.convert(model, softmax), known, steps, args.seed, "softmax")
    print(f"{len(new[0])} new sentences          right answers   zero weights")
    report(f"softmax, {steps} steps", model, new)
    report("then entmax, untrained", hf.convert(copy.deepcopy(model), entmax), new)
    for name, omega in {"softmax": softmax, "entmax": entmax}.items():
        further = hf.convert(copy.deepcopy(model), omega)
        train(further, known, steps, args.seed + 1, f"{name}, further")
        report(f"then {name}, {steps} steps", further, new)


if __name__ == "__main__":
    main()
