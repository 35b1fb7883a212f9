"""Images to classes: what `loop.train` needs to know of the vision transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from papers.checks import check_whole
from papers.experiments.data.images import ImageData, Split
from papers.experiments.loop import Batch, finite
from papers.experiments.vit.model import Size, VisionTransformer

_AT_ONCE = 500  # images of an evaluation


@dataclass(eq=False)
class VitStudy:
    """attention: how the class token looks in the last layer.

    sharing: the share of steps in which the class token also sees the tokens of another image of
        the same class, its neighbour in the batch; in tests it never does.
    held: training images kept back, on which early stopping watches; with none, on the test's.
    """

    data: ImageData
    size: Size
    attention: str
    sharing: float = 0.0
    held: int = 0
    train: Split = field(init=False)
    watched: Split = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.sharing <= 1:
            raise ValueError(f"sharing must lie in [0, 1], got {self.sharing}")
        check_whole(self.held, "held", 0)
        images, labels = self.data.train.images, self.data.train.labels
        keep = len(labels) - self.held
        if keep < 2:
            raise ValueError(f"held = {self.held} leaves no images to train on")
        self.train = Split(images[:keep], labels[:keep])
        self.watched = Split(images[keep:], labels[keep:])
        mean, deviation = self.data.statistics()
        self.mean, self.deviation = mean[:, None, None], deviation[:, None, None]

    def build(self) -> nn.Module:
        _, channels, side, _ = self.train.images.shape
        shape = {"side": side, "channels": channels, "classes": self.data.classes}
        return VisionTransformer(self.size, self.attention, **shape)

    def order(self, epoch: int, batch: int, seed: int) -> list[list[int]]:
        """Neighbours 2i and 2i + 1 are of one class, in random order otherwise; each image once,
        but for an odd one of a class and the rest that fills no batch."""
        if batch % 2:
            raise ValueError(
                f"a batch holds pairs of one class: its size must be even, got {batch}"
            )
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        pairs = []
        for label in range(self.data.classes):
            places = (self.train.labels == label).nonzero()[:, 0]
            places = places[torch.randperm(len(places), generator=generator)]
            pairs.append(places[: len(places) // 2 * 2].unflatten(0, (-1, 2)))
        joined = torch.cat(pairs)
        shuffled = joined[torch.randperm(len(joined), generator=generator)].flatten()
        batches = shuffled[: len(shuffled) // batch * batch].unflatten(0, (-1, batch))
        if not len(batches):
            raise ValueError(f"{len(shuffled)} images fill no batch of {batch}")
        lists: list[list[int]] = batches.tolist()
        return lists

    def gathered(self, examples: Sequence[int], generator: torch.Generator) -> Batch:
        if self.sharing and len(examples) % 2:
            raise ValueError(
                f"images are shared by pairs, but {len(examples)} come to a process: give a batch "
                "that is a multiple of twice the number of processes"
            )
        places = torch.tensor(examples)
        shared = torch.rand((), generator=generator) < self.sharing
        return {
            "images": self._scaled(self.train.images[places]),
            "labels": self.train.labels[places],
            "shared": shared,
        }

    def cases(self, examples: Sequence[int]) -> list[tuple[float, Batch]]:
        batch = self.gathered(examples, torch.Generator())
        shares = ((1 - self.sharing, False), (self.sharing, True))
        return [(share, batch | {"shared": torch.tensor(shared)}) for share, shared in shares]

    def facts(self, model: nn.Module, folder: Path) -> dict[str, Any]:
        return {}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        partner = None
        if bool(batch["shared"]):
            partner = torch.arange(len(batch["labels"]), device=batch["labels"].device) ^ 1
        answers = model(batch["images"], partner)
        return nn.functional.cross_entropy(answers, batch["labels"])

    def scores(self, model: nn.Module) -> dict[str, float]:
        tested = {"test accuracy": self._accuracy(model, self.data.test)}
        return {"accuracy": self._accuracy(model, self.watched), **tested} if self.held else tested

    def _accuracy(self, model: nn.Module, split: Split) -> float:
        device = next(model.parameters()).device
        right = 0
        for start in range(0, len(split), _AT_ONCE):
            images = self._scaled(split.images[start : start + _AT_ONCE]).to(device)
            chosen = finite(model(images)).argmax(-1).cpu()
            right += int((chosen == split.labels[start : start + _AT_ONCE]).sum())
        return right / len(split)

    def _scaled(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.deviation
