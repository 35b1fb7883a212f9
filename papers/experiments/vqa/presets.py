"""The runs of the thesis' Tables 6.2 to 6.4 on four data sets, at three sizes. CLAIMS F-Tab6.1"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from papers.experiments.data.digest import of_questions
from papers.experiments.data.questions import QuestionData
from papers.experiments.loop import Training
from papers.experiments.runs import Job
from papers.experiments.vqa.model import Size
from papers.experiments.vqa.reading import plane
from papers.experiments.vqa.study import VqaStudy

STUDY = "vqa"


@dataclass(frozen=True)
class Course:
    """How a data set is trained on. functions: of the bases of continuous attention, the more of
    them first; the grid has more cells. several: answers of several people, each in part right."""

    size: Size
    epochs: int
    batch: int
    rate: float
    functions: tuple[int, int]
    together: int = 1
    warmup: int = 100
    weight_decay: float = 0.01
    several: bool = False

    def attentions(self) -> tuple[str, ...]:
        """In the order of the tables."""
        many, few = self.functions
        return (
            "question-only",
            "softmax",
            "entmax",
            "sparsemax",
            f"continuous-softmax-{many}",
            f"continuous-softmax-{few}",
            f"continuous-sparsemax-{many}",
            f"continuous-sparsemax-{few}",
            f"2-mca-{many}",
            f"4-mca-{many}",
        )


@dataclass(frozen=True)
class Preset:
    courses: dict[str, Course]
    seeds: int
    threads: int | None
    precision: str = "no"


_SMALL = Size(words=32, width=64, inner=128, layers=1, heads=4, flat=64, fused=128, dropout=0.0)
_TINY = Size(words=8, width=16, inner=16, layers=1, heads=2, flat=16, fused=16, dropout=0.0)
_THESIS = Size(words=300, width=512, inner=2048, layers=6, heads=8, flat=512, fused=1024)

PRESETS = {
    "smoke": Preset(
        {"shapes-tiny": Course(_TINY, 2, 32, 3e-3, (16, 9), together=4, warmup=5)}, 1, 1
    ),
    "cpu": Preset(
        {
            "shapes": Course(_SMALL, 6, 128, 2e-3, (36, 16), together=7),
            # At 2e-3 the small CNN did not learn to tell shapes apart: 88 % with softmax.
            "easy": Course(replace(_SMALL, halvings=4, head=128), 8, 128, 5e-4, (9, 4), together=4),
            "daquar": Course(replace(_SMALL, dropout=0.1), 6, 64, 1e-3, (100, 49), together=8),
        },
        seeds=3,
        threads=1,
    ),
    "paper": Preset(
        {
            "vqa-v2": Course(
                _THESIS, 13, 64, 1e-4, (100, 49), warmup=4000, weight_decay=0.0, several=True
            )
        },
        seeds=1,
        threads=None,
        precision="bf16",
    ),
}


def load(
    name: str,
    folder: Path = Path("data"),
    cache: Path | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> QuestionData:
    """folder: holds daquar/ and mobilenet_v2/, or the files of VQA-v2; and easy_vqa/ where that is
    not installed. cache: of features."""
    if name in ("shapes", "shapes-tiny"):
        from papers.experiments.data.shapes import load_seen

        return load_seen(cache, advance=advance) if name == "shapes" else _tiny()
    if name == "easy":
        from papers.experiments.data.easy import load_easy

        there = any((folder / part).is_dir() for part in ("easy_vqa", "train"))
        return load_easy(folder if there else None)
    if name == "daquar":
        from papers.experiments.data.daquar import load_daquar

        return load_daquar(folder, folder / "mobilenet_v2", cache=cache, advance=advance)
    from papers.experiments.data.vqa2 import load_vqa2

    return load_vqa2(folder)


def _tiny() -> QuestionData:
    from papers.experiments.data.shapes import load_shapes

    return replace(load_shapes(images=(120, 60)), name="shapes-tiny")


def jobs(preset: str, data: QuestionData, attentions: Sequence[str], seeds: int) -> list[Job]:
    """By seed, then by attention, so that a queue that is stopped leaves whole comparisons."""
    _check_attentions(attentions, data, PRESETS[preset].courses[data.name].size)
    digest = of_questions(data)
    return [
        job(preset, data, attention, seed, digest)
        for seed in range(seeds)
        for attention in attentions
    ]


def _check_attentions(attentions: Sequence[str], data: QuestionData, size: Size) -> None:
    """What cannot be is told before the first run, not after it."""
    most = max(
        (settings.modes for settings in map(plane, attentions) if settings is not None), default=1
    )
    if most > 1:
        rows, columns = VqaStudy(data, size, attentions[0]).shapes().grid
        if most > rows * columns:
            raise ValueError(
                f"{most} modes are more than the {rows * columns} cells of a picture of "
                f"{data.name}; give K <= {rows * columns} in K-mca-N"
            )


def job(
    preset: str, data: QuestionData, attention: str, seed: int, digest: str | None = None
) -> Job:
    """digest: of the data, where it is known already."""
    settings = PRESETS[preset]
    course = settings.courses[data.name]
    epoch = max(1, len(data.train) // course.batch)
    training = Training(
        steps=epoch * course.epochs,
        batch=course.batch,
        rate=course.rate,
        warmup=course.warmup,
        weight_decay=course.weight_decay,
        precision=settings.precision if torch.cuda.is_available() else "no",  # a CPU may lack it
        evaluate_every=max(1, epoch * course.epochs // 5),
        save_every=max(1, min(200, epoch * course.epochs // 5)),
        seed=seed,
    )
    config = {"attention": attention, "size": asdict(course.size), "together": course.together}
    config |= {"several": course.several, "threads": settings.threads, "note": data.note}
    config["data_digest"] = of_questions(data) if digest is None else digest
    return Job(STUDY, preset, data.name, attention, config, training)


def study(job: Job, data: QuestionData) -> VqaStudy:
    config = job.config
    data = replace(data, test=data.test.first(config.get("tested")))
    size = Size(**config["size"])
    return VqaStudy(
        data,
        size,
        config["attention"],
        together=config["together"],
        several=config["several"],
        keep_looks=job.training.seed == 0,
    )
