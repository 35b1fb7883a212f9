"""One regulariser of each family, for tests that go through all of them (four keys a row)."""

import fenchel as fl

FAMILIES = {
    "shannon": fl.Shannon,
    "tsallis 1.5": lambda: fl.Tsallis(1.5),
    "tsallis 1.2": lambda: fl.Tsallis(1.2, 0.7),
    "sparsemax": lambda: fl.Tsallis(2.0),
    "tsallis 3": lambda: fl.Tsallis(3.0),
    "norm": lambda: fl.Norm(2.0),
    "budget": lambda: fl.Budget(2),
    "fused": lambda: fl.Fused(0.2),
    "fused grid": lambda: fl.Fused(0.2, grid=(2, 2)),
}
