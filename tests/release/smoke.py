"""What an installed fenchel must do, run by its own Python in an empty folder.

python smoke.py native | plain
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers

import fenchel as fl
from fenchel import continuous, dual

LETTERS = "abcdefghijklmnopqrstuvwxyz"


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


def save_bert(folder):
    """A small one with random weights and a tokenizer."""
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.BertModel(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    numbers = {word: number for number, word in enumerate(words)}
    transformers.BertTokenizer(vocab=numbers).save_pretrained(folder)


kernels = sys.argv[1]
check(Path.cwd() not in Path(fl.__file__).parents, "fenchel comes from this folder")
for name in ("papers", "benchmarks", "tests"):
    check(find_spec(name) is None, f"{name} is installed")
facts = json.loads(command("info", "--json"))
check(facts["fenchel"] == fl.__version__, "fenchel info")
native = facts["fast_paths"][0]
check(native["active"] == (kernels == "native"), native["why"])

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
points = torch.rand(2, 5, 2, dtype=torch.float64)
one, other = (fl.measures.Empirical(part) for part in points)
check(float(fl.measures.wasserstein1(one, other)) > 0, "Wasserstein distance")

save_bert(Path("bert"))
Path("texts.txt").write_text("a b c d\nd c b a\n")
command("audit", "bert", "--texts", "texts.txt", "--out", "audit")
written = {path.name for path in Path("audit").iterdir()}
check({"report.html", "heads.csv", "recipe.json", "figures"} <= written, f"audit: {written}")
print(f"fenchel {fl.__version__}, {kernels} kernels: works")
