"""Every regulariser through the one contract suite."""

import torch

import fenchel as fl
from fenchel.testing import RegularizerContract


class Rows(RegularizerContract):
    """Scores with zeros in the answer, away from the boundary of the support."""

    def make_scores(self, seed):
        generator = torch.Generator().manual_seed(100 + seed)
        return 2 * torch.randn(3, 8, dtype=torch.float64, generator=generator)


class TestShannon(Rows):
    def make_regularizer(self):
        return fl.Shannon(0.7)


class TestTsallis15(Rows):
    def make_regularizer(self):
        return fl.Tsallis(1.5)


class TestTsallisGeneric(Rows):
    def make_regularizer(self):
        return fl.Tsallis(1.3, temperature=0.6)


class TestSparsemax(Rows):
    def make_regularizer(self):
        return fl.Tsallis(2.0, temperature=1.3)


class TestTsallisSteep(Rows):
    def make_regularizer(self):
        return fl.Tsallis(3.0)


class TestTsallisAtOne(Rows):
    def make_regularizer(self):
        return fl.Tsallis(torch.tensor(1.0, dtype=torch.float64))


class TestTsallisTensors(Rows):
    """Parameters as tensors take the smooth path through alpha = 1."""

    def make_regularizer(self):
        return fl.Tsallis(torch.tensor(1.25, dtype=torch.float64), torch.tensor(0.8).double())


class TestNorm(Rows):
    def make_regularizer(self):
        return fl.Norm(1.6)


class TestNormSteep(Rows):
    def make_regularizer(self):
        return fl.Norm(2.5)


class TestBudget(Rows):
    def make_regularizer(self):
        return fl.Budget(2.5)


class TestFusedLine(Rows):
    def make_regularizer(self):
        return fl.Fused(0.2)


class TestFusedGrid(Rows):
    def make_regularizer(self):
        return fl.Fused(0.2, grid=(2, 4))
