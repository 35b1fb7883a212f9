"""What an installed fenchel must do, run by its own Python in an empty folder.

python smoke.py native | plain
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

import fenchel as fl
from fenchel import continuous, dual
from fenchel._kernels.route import describe_native


def check(holds, what):
    if not holds:
        raise SystemExit(f"smoke: {what}")


def command(*words):
    done = subprocess.run(
        [Path(sys.executable).parent / "fenchel", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    check(done.returncode == 0, f"fenchel {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


kernels = sys.argv[1]
check(Path.cwd() not in Path(fl.__file__).parents, "fenchel comes from this folder")
active, why = describe_native()
check(active == (kernels == "native"), why)

torch.manual_seed(0)
scores = torch.randn(3, 8, dtype=torch.float64)
solution = fl.solve(scores, fl.Tsallis(1.5))
check(float(solution.gap.max()) < 1e-12, "gap")
q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
fl.attention(q, k, v, fl.Tsallis(1.5)).sum().backward()
check(bool(q.grad.isfinite().all()), "gradient of attention")
exact = dual.estimate(torch.randn(1, 6, 3), None, torch.randn(2, 3), 1.0)
check(bool(exact.weights.sum(-1).allclose(torch.ones(2))), "estimate")
weights, places = torch.rand(2, 16), continuous.cell_centers(4, 4)
density = continuous.match_moments(weights, places, continuous.Paraboloid)
check(bool(density.mean.isfinite().all()), "continuous attention")

facts = json.loads(command("info", "--json"))
check(facts["fenchel"] == fl.__version__, "fenchel info")
found = json.loads(command("claims", "--id", "L-5", "--id", "F-E3.6", "--json", "-"))
check([each["verdict"] for each in found] == ["CONFIRMED"] * 2, found)
print(f"fenchel {fl.__version__}, {kernels} kernels: works")
