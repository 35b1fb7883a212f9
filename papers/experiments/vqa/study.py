"""Questions to answers: what `loop.train` needs to know of the co-attention network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from papers.experiments.data.questions import KINDS, QuestionData, QuestionSplit
from papers.experiments.loop import Batch, finite
from papers.experiments.vqa.measures import agreement, looks, selection
from papers.experiments.vqa.model import CoAttention, Shapes, Size

_AT_ONCE = 256  # questions of an evaluation


@dataclass(eq=False)
class VqaStudy:
    """attention: how the picture is read in the end.

    together: at most so many questions about a picture are neighbours in a batch, so that its
        features are made once for them.
    several: a question has several answers, each in part right, as in VQA-v2.
    keep_looks: keep maps of where it looked, of a few test questions.
    """

    data: QuestionData
    size: Size
    attention: str
    together: int = 1
    several: bool = False
    keep_looks: bool = False

    def __post_init__(self) -> None:
        known = self.data.train.answers[:, 0] >= 0
        self.trained = known.nonzero()[:, 0]
        if not len(self.trained):
            raise ValueError(f"{self.data.name}: no training question has a known answer")

    def shapes(self) -> Shapes:
        sample = self.data.train.pictures.gathered(torch.zeros(1, dtype=torch.int64))
        pixels = sample.dtype == torch.uint8
        grid = [side >> self.size.halvings for side in sample.shape[2:]]
        channels = None
        if not pixels:
            grid, channels = list(sample.shape[1:3]), sample.shape[3]
        sizes = (len(self.data.vocabulary), len(self.data.answers))
        return Shapes(*sizes, (grid[0], grid[1]), channels)

    def build(self) -> nn.Module:
        return CoAttention(self.size, self.shapes(), self.attention)

    def order(self, epoch: int, batch: int, seed: int) -> list[list[int]]:
        """Questions in random order, but up to `together` about one picture side by side."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        shuffled = self.trained[torch.randperm(len(self.trained), generator=generator)]
        groups: dict[tuple[int, int], list[int]] = {}
        counts: dict[int, int] = {}
        pictures = self.data.train.picture[shuffled].tolist()
        for question, picture in zip(shuffled.tolist(), pictures, strict=True):
            number = counts.get(picture, 0)
            counts[picture] = number + 1
            groups.setdefault((picture, number // self.together), []).append(question)
        every = list(groups.values())
        drawn = torch.randperm(len(every), generator=generator).tolist()
        flat = [question for place in drawn for question in every[place]]
        if len(flat) < batch:
            raise ValueError(f"{len(flat)} questions fill no batch of {batch}")
        return [flat[start : start + batch] for start in range(0, len(flat) - batch + 1, batch)]

    def gathered(self, examples: Sequence[int], generator: torch.Generator) -> Batch:
        return self.batch(self.data.train, torch.tensor(examples))

    def cases(self, examples: Sequence[int]) -> list[tuple[float, Batch]]:
        return [(1.0, self.gathered(examples, torch.Generator()))]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["words"], batch["pictures"], batch["which"]).scores
        if not self.several:
            return nn.functional.cross_entropy(scores, batch["answers"][:, 0])
        wanted = _spread(batch["answers"], batch["worth"], scores.shape[-1]).to(scores.dtype)
        every = nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")
        return every / len(scores)

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Of all test questions, and of each kind."""
        return self.by_kind(self.worth(model))

    def by_kind(self, worth: Tensor) -> dict[str, float]:
        scores = {"accuracy": float(worth.mean())}
        for number, kind in enumerate(KINDS):
            of_kind = self.data.test.kinds == number
            if of_kind.any():
                scores[kind] = float(worth[of_kind].mean())
        return scores

    def worth(self, model: nn.Module) -> Tensor:
        """(n), what the network's answer to each test question scores."""
        split = self.data.test
        values = torch.empty(len(split), dtype=torch.float64)
        for places, batch in self.evaluated(split, next(model.parameters()).device):
            scores = model(batch["words"], batch["pictures"], batch["which"]).scores
            right = batch["answers"] == finite(scores).argmax(-1, keepdim=True)
            values[places] = (right * batch["worth"]).sum(-1).double().cpu()
        return values

    def evaluated(
        self, split: QuestionSplit, device: torch.device
    ) -> Iterator[tuple[Tensor, Batch]]:
        """All questions of a split, by picture, which then is looked at once; a batch at a time,
        for all their pictures may not fit into the memory."""
        order = split.picture.argsort(stable=True)
        for places in order.split(_AT_ONCE):
            yield places, {k: v.to(device) for k, v in self.batch(split, places).items()}

    def facts(self, model: nn.Module, folder: Path) -> dict[str, Any]:
        measures = {
            "agreement": agreement(self, model),
            "selection": selection(self, model, seed=0),
            "looks": looks(self, model) if self.keep_looks else None,
        }
        return {name: value for name, value in measures.items() if value is not None}

    def batch(self, split: QuestionSplit, places: Tensor) -> Batch:
        pictures, which = split.picture[places].unique(return_inverse=True)
        return {
            "words": split.words[places],
            "pictures": split.pictures.gathered(pictures),
            "which": which,
            "answers": split.answers[places],
            "worth": split.worth[places],
        }


def _spread(answers: Tensor, worth: Tensor, count: int) -> Tensor:
    """(batch, count), what each answer scores."""
    room = torch.zeros(len(answers), count + 1, dtype=worth.dtype, device=worth.device)
    places = torch.where(answers >= 0, answers, count)  # those of no answer are cut off
    return room.scatter_reduce(1, places, worth, "amax")[:, :count]
