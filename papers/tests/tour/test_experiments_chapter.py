"""The chapter trains, shows what it trained, and leaves the process as it was."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

from papers.tour.chapter import Chapter, Tour
from papers.tour.chapters import experiments

pytestmark = pytest.mark.xdist_group("tour")

QUICK = Tour(seed=0, quick=True)


@pytest.fixture(scope="module")
def written() -> Chapter:
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.get_num_threads()
    chapter = experiments.chapter(QUICK)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    return chapter


def test_tables_have_a_row_for_each_attention(written: Chapter) -> None:
    images, answers, looked = written.tables
    assert [row[0] for row in images.rows] == ["ViT", "OT-ViT", "ViT, entmax-1.5"]
    assert [row[0] for row in answers.rows] == ["discrete softmax", "2D continuous softmax"]
    for row in (*images.rows, *looked.rows):
        assert 0 <= float(str(row[1])) <= 100
    assert all("Seconds of training, one seed." in table.caption for table in written.tables)


def test_figures_and_plain_words(written: Chapter) -> None:
    curves, maps = written.figures
    assert len(curves.panels) == 2
    assert 1 <= len(maps.panels) <= 3
    assert all("data:image/png" in panel for panel in maps.panels)
    assert "proves nothing" in written.intro


def test_without_accelerate_the_chapter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "accelerate":
            raise ModuleNotFoundError("No module named 'accelerate'", name="accelerate")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    chapter = experiments.chapter(QUICK)
    assert chapter.figures == ()
    assert "needs accelerate: `pip install" in chapter.intro
