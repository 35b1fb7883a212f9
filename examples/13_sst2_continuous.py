"""Continuous attention over a sentence: where in it does a classifier of sentiment look?

Each word of a sentence (SST-2) has an embedding and a score. Discrete attention pools the words by
the softmax of the scores. Continuous attention makes a density over the sentence, [0, 1], with the
mean and variance of those weights: a Gaussian, which reaches everywhere, or a paraboloid, which is
zero outside an interval. Without the data: generated sentences in which a run of words decides.

    python examples/13_sst2_continuous.py
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from pathlib import Path

import torch
from _data import add_data, add_steps, found, parser, steps_of, track
from torch import Tensor, nn

import fenchel as fl

Rows = list[tuple[list[str], int]]  # words of a sentence, 1 = positive


def real(file: Path) -> Rows:
    pairs = (line.rsplit("\t", 1) for line in file.read_text(encoding="utf-8").splitlines())
    return [(text.split(), int(label)) for text, label in pairs]


def generated(count: int) -> Rows:
    """8 to 20 words, among which a run of three is good or bad; the others say nothing."""
    rows = []
    for label in (random.randrange(2) for _ in range(count)):
        words = [f"w{random.randrange(500)}" for _ in range(random.randint(5, 17))]
        place = random.randint(0, len(words))
        words[place:place] = [f"{('bad', 'good')[label]}{random.randrange(50)}" for _ in range(3)]
        rows.append((words, label))
    return rows


def grouped(rows: Rows, numbers: dict[str, int]) -> list[Tensor]:
    """(sentence, 1 + length) for each length, the label first: no padding, [0, 1] is the text."""
    groups: dict[int, list[list[int]]] = {}
    for words, label in rows:
        groups.setdefault(len(words), []).append([label, *(numbers.get(w, 0) for w in words)])
    return [torch.tensor(group) for group in groups.values()]


class Classifier(nn.Module):
    def __init__(self, words: int, omega: fl.Regularizer | None, width: int = 64) -> None:
        super().__init__()
        self.words, self.leave = nn.Embedding(words, width), nn.Linear(width, 2)
        self.score = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.drop = nn.Dropout(0.3)
        self.pool = None if omega is None else fl.nn.ContinuousAttention1d(omega, functions=16)

    def forward(self, text: Tensor) -> Tensor:
        x = self.drop(self.words(text))  # (sentence, word, width)
        scores = self.score(x).squeeze(-1)
        if self.pool is None:
            return self.leave((scores.softmax(-1).unsqueeze(-1) * x).sum(1))
        return self.leave(self.pool(x, scores).context)

    @torch.no_grad()
    def looked(self, text: Tensor) -> list[float]:
        """Of the density over one sentence: mean, deviation, and how much of [0, 1] it covers."""
        scores = self.score(self.words(text)).squeeze(-1)
        density = self.pool.density(scores, (len(text),))
        low, high = (edge.clamp(0, 1) for edge in density.projection())
        return [float(x) for x in (density.mean, density.covariance_matrix.sqrt(), high - low)]


def train(model: Classifier, known: list[Tensor], steps: int, seed: int) -> Classifier:
    torch.manual_seed(seed)  # the same batches for every way
    sizes = torch.tensor([float(len(group)) for group in known])
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(steps):
        group = known[int(torch.multinomial(sizes, 1))]  # a length, as often as it occurs
        batch = group[torch.randint(len(group), (32,))]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[:, 1:]), batch[:, 0]).backward()
        optimizer.step()
    return model.eval()


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/13_sst2_continuous.py --steps 200")
    add_steps(options, usual=800, quick=100)
    add_data(options)
    args = options.parse_args(argv)
    random.seed(args.seed)
    folder = args.data / "text"
    if found(folder, "a set of generated sentences"):
        known, new = (real(folder / f"sst2.{part}.tsv") for part in ("train", "test"))
    else:
        known, new = generated(2000), generated(1000)
    counts = Counter(word for words, _ in known for word in words)
    often = (word for word, count in counts.items() if count > 1)
    numbers = {word: number for number, word in enumerate(often, 1)}  # 0: any other
    groups, tests = grouped(known, numbers), grouped(new, numbers)
    seeds = range(args.seed, args.seed + (1 if args.quick else 3))
    print(f"right answers on {len(new)} sentences: mean, and seed by seed")
    ways = {"continuous softmax": fl.Shannon(), "continuous sparsemax": fl.Tsallis(2.0)}
    for name, omega in {"discrete softmax": None, **ways}.items():
        shares = []
        for seed in track(seeds, name):
            torch.manual_seed(seed)
            model = train(Classifier(len(numbers) + 1, omega), groups, steps_of(args), seed)
            with torch.no_grad():
                right = sum(int((model(x[:, 1:]).argmax(-1) == x[:, 0]).sum()) for x in tests)
            shares.append(right / len(new))
        print(f"{name:<22}{sum(shares) / len(shares):6.1%} :", *(f"{x:6.1%}" for x in shares))
    seen = []
    for words in (words for words, _ in new if len(words) >= 10):
        mean, deviation, covered = model.looked(torch.tensor([numbers.get(w, 0) for w in words]))
        seen.append((deviation, mean, covered, words))
    deviation, mean, covered, words = min(seen)  # the most decided
    low, high = (len(words) * (mean + sign * deviation) for sign in (-1, 1))
    first, last = max(0, int(low)), math.ceil(high)
    print("the narrowest sparsemax, its mean and a deviation to both sides in brackets:")
    print(" ", *words[:first], "[", *words[first:last], "]", *words[last:])
    usual = statistics.median(covered for _, _, covered, _ in seen)
    print(f"it is not zero on {covered:.0%} of the sentence, in the median sentence on {usual:.0%}")


if __name__ == "__main__":
    main()
