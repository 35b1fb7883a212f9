"""What the page says of each study beside its numbers, and where those come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.tables import Listing
from papers.experiments.report import reported
from papers.experiments.tables import Document
from papers.experiments.vit import presets as vit_presets
from papers.experiments.vit import tables as vit_tables
from papers.experiments.vqa import presets as vqa_presets
from papers.experiments.vqa import tables as vqa_tables

TITLES = {
    "fashion-mnist": "Fashion-MNIST",
    "cifar-10": "CIFAR-10",
    "cifar-100": "CIFAR-100",
    "shapes": "Shapes-VQA",
    "easy": "easy-VQA",
    "daquar": "DAQUAR",
    "vqa-v2": "VQA-v2",
}
GENERATED = ("shapes", "easy")  # need no folder of files


@dataclass(frozen=True)
class Part:
    """A study as the page shows it.

    score: the one that is compared. sets: of a preset, each with its attentions. joint: tables over
    all data sets; of_data: of one data set. names: of attentions in the order of the tables.
    verdicts: whether the claims held. reported: the paper's own tables.
    """

    study: str
    title: str
    source: str
    intro: str
    remarks: tuple[str, ...]
    score: str
    presets: dict[str, Any]
    sets: Callable[[Any], dict[str, tuple[str, ...]]]
    joint: Callable[[Sequence[Document]], list[Listing]]
    of_data: Callable[[Sequence[Document], str], list[Listing]]
    names: Callable[[Sequence[Document]], dict[str, str]]
    verdicts: Callable[[Sequence[Document], str], list[str]]
    reported: tuple[Listing, ...]


_VIT_INTRO = """\
*Deciphering Attention Mechanisms* (section 9) lets the class token of a vision transformer look
at the patches in the last layer by transport attention, which in training may also see the
patches of another image of the same class. Everything else but the scale of the scores (see the
remarks) is as in the plain transformer.
**Its claim:** OT-ViT consistently outperforms ViT. The rows with entmax and others are ours:
the same network, whose class token looks by another regulariser of fenchel."""

_VIT_REMARKS = (
    "The paper's own intervals overlap on Fashion-MNIST and CIFAR-10; only on CIFAR-100 are "
    "they apart. Ours are of differences between runs of the same seed.",
    "In the paper's Table 1 OT-ViT is better at one rate of three, that of Table 2.",
    "Six layers of a hidden dimension 512 have more than 3.2 M parameters; those fit with 512 "
    "inside the feed-forward layers and a width of 256, which is our preset `paper`.",
    "γ is the root of the whole width, as the paper writes it, while ViT divides its scores by the "
    "root of a head's width: with four heads OT-ViT's class token looks at half of ViT's scale. "
    "The row *γ of a head* is ours and has ViT's scale.",
)

_VQA_INTRO = """\
Farinhas, *Visual Attention with Sparse and Continuous Transformations* (chapter 6), answers
questions about pictures with a co-attention network, and at its end reads the picture by
discrete attention over the cells of a grid, or by a density over the plane with fewer functions
N than there are cells. **Its claims:** one continuous mode does as well as discrete softmax, or
slightly better; several modes (K-MCA), or a number of them chosen for each question at test
time (test-MCA), bring no clear gain; a larger penalty λ chooses one mode more often. The row
*question only* is ours: the same network without the picture. VQA-v2 with its features needs
tens of gigabytes and GPUs: the preset `paper` trains on it where it is, and the results below
are on smaller data."""

_VQA_REMARKS = (
    "**Width of the functions.** The thesis takes Gaussians of covariance 0.001 · I for N = 49 "
    "and 100. These leave holes: a picture that is 1 everywhere becomes 0.006 to 3.61 (N = 49), "
    "or 0.29 to 2.68 (N = 100). Ours fit the spacing, covariance I / N, and give 0.98 to 1.03 "
    "for N = 100.",
    "**Choice of the number of modes.** The thesis' criterion is −2 Σ w ln p + λK. With weights "
    "that sum to 1 its first term gains at most about 24, so λ = 100 and 500 would always "
    "choose one mode, which its Table 6.4 contradicts. Ours has the factor L, the number of "
    "cells, before the first term.",
    "**Integrals of continuous sparsemax.** The thesis sums over equal steps of the angle and "
    "counts both ends of the circle, which are one point: up to 36 % off where a narrow "
    "function lies there. Ours counts no point twice and places its nodes where the function is "
    "([continuous attention](continuous.md)).",
)


def title(data: str) -> str:
    """A data set that is not known goes by its own name."""
    return TITLES.get(data, data)


def _vit_joint(documents: Sequence[Document]) -> list[Listing]:
    titled = [_titled(listing) for listing in vit_tables.listings(documents)[:-1]]  # costs: by set
    return [listing for listing in titled if listing.rows]


def _titled(listing: Listing) -> Listing:
    header = [title(name) for name in listing.header]
    return Listing(listing.title, header, listing.rows)


def _vit_sets(preset: vit_presets.Preset) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(preset.epochs, preset.attentions)


def _vit_names(documents: Sequence[Document]) -> dict[str, str]:
    present = sorted({document["settings"]["attention"] for document in documents})
    labels = {name: label for name, label in vit_tables.NAMES.items() if name in present}
    return labels | {name: name for name in present if name not in labels}


def _vqa_sets(preset: vqa_presets.Preset) -> dict[str, tuple[str, ...]]:
    return {name: course.attentions() for name, course in preset.courses.items()}


def _vqa_of_data(documents: Sequence[Document], data: str) -> list[Listing]:
    return [
        listing._replace(title=listing.title.removeprefix(f"{data}: "))
        for listing in vqa_tables.of_data(documents, data)
    ]


VIT = Part(
    vit_presets.STUDY,
    "Vision transformer with transport attention",
    "the paper",
    _VIT_INTRO,
    _VIT_REMARKS,
    "test accuracy",
    vit_presets.PRESETS,
    _vit_sets,
    _vit_joint,
    lambda documents, data: [],
    _vit_names,
    lambda documents, data: [vit_tables.verdict(documents, data)],
    reported.VIT,
)
VQA = Part(
    vqa_presets.STUDY,
    "Questions about pictures with continuous attention",
    "the thesis",
    _VQA_INTRO,
    _VQA_REMARKS,
    "accuracy",
    vqa_presets.PRESETS,
    _vqa_sets,
    lambda documents: [],
    _vqa_of_data,
    vqa_tables.names,
    vqa_tables.verdicts,
    reported.VQA,
)
PARTS = (VIT, VQA)
