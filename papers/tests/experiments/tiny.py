"""Studies that take no time: a line through points, and questions about a few random pictures."""

from dataclasses import dataclass, field

import torch
from torch import nn

from papers.experiments.data.questions import InMemory, QuestionData, QuestionSplit
from papers.experiments.loop import Training
from papers.experiments.runs import Job
from papers.experiments.vqa.model import Size

SIZE = Size(words=8, width=8, inner=8, layers=1, heads=2, flat=8, fused=8, dropout=0.0)
WORDS, ANSWERS, LONGEST = 7, ["yes", "2", "red", "blue"], 5


@dataclass
class Line:
    """y = 2 x - 1. steps: how often it was trained; told: scores to give instead of its own."""

    told: list[float] = field(default_factory=list)
    steps: int = 0

    def build(self):
        return nn.Linear(1, 1)

    def order(self, epoch, batch, seed):
        return [list(range(start, start + batch)) for start in (0, batch)]

    def gathered(self, examples, generator):
        self.steps += 1
        return self.batch(examples)

    def batch(self, examples):
        x = torch.tensor(examples).float().unsqueeze(-1) / 8
        return {"x": x, "y": 2 * x - 1}

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["y"]).square().mean()

    def scores(self, model):
        score = -float(self.loss(model, self.batch([3, 4])))
        return {"score": self.told.pop(0) if self.told else score, "slope": float(model.weight)}

    def cases(self, examples):
        return [(0.25, self.batch(examples[:1])), (0.75, self.batch(examples))]

    def facts(self, model, folder):
        return {"intercept": float(model.bias)}


def line_job(variant="plain", seed=0, config=None, **training):
    shape = {"steps": 12, "batch": 4, "warmup": 2, "evaluate_every": 4, "save_every": 3}
    settings = Training(seed=seed, **shape | training)
    return Job("line", "small", "points", variant, {} if config is None else config, settings)


def split(count, pictures, side=32, seed=0, regions=False):
    """Two to four words, one answer, pictures in turn; regions: the upper left quarter."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (count, LONGEST), generator=draw)
    lengths = torch.randint(2, LONGEST, (count, 1), generator=draw)
    about = torch.zeros(count, side, side, dtype=torch.bool)
    about[:, : side // 2, : side // 2] = True
    shape = (pictures, 3, side, side)
    return QuestionSplit(
        InMemory(torch.randint(0, 256, shape, generator=draw).to(torch.uint8)),
        torch.arange(count) % pictures,
        words.where(torch.arange(LONGEST) < lengths, 0),
        torch.randint(0, len(ANSWERS), (count, 1), generator=draw),
        torch.ones(count, 1),
        torch.arange(count) % 3,
        about if regions else None,
    )


def questions(train=24, test=12, pictures=6, side=32):
    vocabulary = ["", "<unknown>", *"abcde"]
    parts = split(train, pictures, side), split(test, pictures, side, seed=1, regions=True)
    return QuestionData("tiny", *parts, vocabulary, ANSWERS)
