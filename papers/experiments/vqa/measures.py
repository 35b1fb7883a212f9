"""What is measured of a trained network beside its accuracy: where it looked, and how many modes a
criterion gives it. CLAIMS F-Tab6.4"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fenchel.continuous import Mixture
from fenchel.regularizers import Shannon
from papers.experiments.data.questions import KINDS, QuestionSplit
from papers.experiments.loop import finite
from papers.experiments.vqa.reading import masses, plane

PENALTIES = (10.0, 100.0, 500.0)
MOST_MODES = 5
_NEAR = 4  # pixels around a region in which the largest weight still counts as a hit
_MAP = 16  # rows and columns of a stored map
_OF_KIND = 6  # examples of each kind whose maps are stored


def agreement(study: Any, model: nn.Module) -> dict[str, float] | None:
    """Of attention with the pixels that a question is about, where they are known.

    mass: the share of the attention inside them; area: their share of the picture, which even
    attention would have; hit: how often the largest weight lies inside, or at most 4 pixels away.
    """
    split: QuestionSplit = study.data.test
    if split.regions is None or getattr(model, "blind", True):
        return None
    asked = split.regions.flatten(1).any(1)
    inside, area, hit = [], [], []
    for places, batch in study.evaluated(split, next(model.parameters()).device):
        wanted = asked[places]
        if not wanted.any():
            continue
        regions = split.regions[places][wanted].float()
        looked = _maps(model, batch, regions.shape[-1])[wanted]
        inside.append((looked * regions).sum((1, 2)))
        area.append(regions.mean((1, 2)))
        hit.append(_hits(looked, regions))
    if not inside:
        return None
    parts_of = {"mass": inside, "area": area, "hit": hit}
    return {name: float(torch.cat(parts).double().mean()) for name, parts in parts_of.items()}


def _maps(model: nn.Module, batch: dict[str, Tensor], side: int) -> Tensor:
    attention = model(batch["words"], batch["pictures"], batch["which"]).attention
    maps = masses(attention, model.shapes.grid, side)  # type: ignore[arg-type, union-attr]
    return finite(maps, "weights of attention").float().cpu()


def _hits(looked: Tensor, regions: Tensor) -> Tensor:
    """A map of equal cells has its largest weight in many pixels: their share inside counts."""
    around = 2 * _NEAR + 1
    near = nn.functional.max_pool2d(regions.unsqueeze(1), around, 1, _NEAR).squeeze(1)
    top = looked >= looked.amax((1, 2), keepdim=True) * (1 - 1e-6)
    return (top * near).sum((1, 2)) / top.sum((1, 2))


def selection(study: Any, model: nn.Module, seed: int) -> dict[str, Any] | None:
    """Of a network trained with one mode: with as many modes for each question as the criterion
    -2 L sum_l w_l ln p(t_l) + penalty K chooses, by penalty: its scores, and how often K modes.

    The thesis' criterion has no factor L = number of cells; without it no penalty of its table
    would ever choose a second mode.
    """
    settings = plane(study.attention)
    if settings is None or settings.modes > 1 or not isinstance(settings.regularizer, Shannon):
        return None
    by_penalty: dict[str, Any] = {}
    before = model.read.density.modes  # type: ignore[union-attr]
    try:
        for penalty in PENALTIES:
            model.read.selecting(penalty, torch.Generator().manual_seed(seed))  # type: ignore[union-attr, operator]
            by_penalty[f"{penalty:g}"] = _selected(study, model)
    finally:
        model.read.density.modes = before  # type: ignore[union-attr]
    return by_penalty


def _selected(study: Any, model: nn.Module) -> dict[str, Any]:
    split: QuestionSplit = study.data.test
    worth = torch.empty(len(split), dtype=torch.float64)
    counts = torch.zeros(MOST_MODES + 1)
    for places, batch in study.evaluated(split, next(model.parameters()).device):
        answered = model(batch["words"], batch["pictures"], batch["which"])
        assert isinstance(answered.attention, Mixture)
        counts += torch.bincount(answered.attention.modes.cpu().flatten(), minlength=len(counts))
        right = batch["answers"] == finite(answered.scores).argmax(-1, keepdim=True)
        worth[places] = (right * batch["worth"]).sum(-1).double().cpu()
    shares = (counts[1:] / counts.sum()).tolist()
    return {"scores": study.by_kind(worth), "modes": [round(share, 5) for share in shares]}


def examples(split: QuestionSplit) -> list[int]:
    """The first questions of each kind: a rule that knows no answer."""
    places = []
    for kind in range(len(KINDS)):
        places += (split.kinds == kind).nonzero()[:_OF_KIND, 0].tolist()
    return places


def looks(study: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Of the examples: the answer given, what it scored, and a map of where it looked."""
    split: QuestionSplit = study.data.test
    chosen = examples(split)
    batch = study.batch(split, torch.tensor(chosen))
    device = next(model.parameters()).device
    answered = model(*(batch[name].to(device) for name in ("words", "pictures", "which")))
    answers = finite(answered.scores).argmax(-1).cpu()
    worth = ((batch["answers"] == answers.unsqueeze(-1)) * batch["worth"]).sum(-1)
    maps: Sequence[str | None] = [None] * len(chosen)
    if answered.attention is not None:
        shares = masses(answered.attention, model.shapes.grid, _MAP)  # type: ignore[arg-type, union-attr]
        maps = [packed(share) for share in finite(shares, "weights of attention")]
    return [
        {
            "question": question,
            "answer": study.data.answers[int(answers[row])],
            "worth": round(float(worth[row]), 3),
            "map": maps[row],
        }
        for row, question in enumerate(chosen)
    ]


def packed(shares: Tensor) -> str:
    """A map in 256 levels of its largest, in base 64."""
    levels = (255 * shares / shares.max().clamp_min(1e-30)).round().to(torch.uint8)
    return base64.b64encode(bytes(levels.flatten().tolist())).decode()


def unpacked(text: str) -> Tensor:
    """(rows, columns), the largest 1."""
    levels = torch.tensor(list(base64.b64decode(text)), dtype=torch.float32)
    shares: Tensor = (levels / 255).unflatten(0, (_MAP, _MAP))
    return shares
