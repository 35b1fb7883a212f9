"""What the kernels should cost beside FlashAttention-2 on devices that are not here: an estimate.

    python -m tests.kernels.gpu.estimate --model FOLDER --texts FILE --out FILE

Nothing is run on a device. Each kernel is compiled for it, the instructions along the shortest way
through each hot loop are counted by pipe, and multiplied with what real scores need: active tiles,
candidates, lengths of lists. `low` lets all pipes of a loop overlap, `high` lets the tensor cores
wait for the other instructions, as FlashAttention-2's forward pass does.
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel._kernels.attention_call import TRAINED, Arguments, Saved
from fenchel._kernels.gpu import launch
from fenchel._kernels.gpu.configurations import configuration
from tests.kernels.gpu.compiler import TOOLS, compiled_for

# Cycles of one SM per visible score, head width 64, bfloat16. FlashAttention-2's forward pass from
# its published speed on an A100 (Dao, 2023) and the same count on an H100; its backward pass takes
# 3.06 times as long. AdaSplash-2 (2026): passes over all keys and over active tiles, low and high,
# counted on its kernels in the same way, and a backward pass over active tiles.
FLASH = {"sm_80": 0.208, "sm_90": 0.130}
BACKWARD = 3.06
ADASPLASH = {
    "sm_80": {"all": (0.380, 0.600), "active": (0.1875, 0.320), "backward": (0.706, 0.847)},
    "sm_90": {"all": (0.3202, 0.4455), "active": (0.114, 0.208), "backward": (0.428, 0.514)},
}
NAMES = {"sm_80": "A100", "sm_90": "H100"}
LATENCY = 600.0  # cycles of two loads from the second-level cache, one after the other
REGISTERS = 65536  # of an SM
STEPS = 3.5  # of Newton's search over lists, as the scores below need them


class Loop(NamedTuple):
    """Instructions of one trip, of all warps of a program."""

    warps: int
    total: int
    tensor: float  # cycles of the tensor cores of one SM

    @property
    def issued(self) -> float:
        """Cycles: an SM issues four instructions of four warps at once."""
        return self.total * self.warps / 4

    def per(self, scores: float) -> tuple[float, float]:
        """Cycles for each of so many scores, low and high."""
        low = max(self.tensor, self.issued)
        return low / scores, (self.tensor + self.issued) / scores


class Sparsity(NamedTuple):
    """Of real or random scores. visible: keys a row sees on average. active: share of the tiles.
    candidates: of a row. listed: steps that a group of rows takes for its longest list. crowded:
    share of the blocks of rows whose lists overflow."""

    name: str
    visible: float
    active: float
    support: float
    candidates: float
    listed: float
    crowded: float


# ---- instructions


def loops(cubin: bytes, warps: int) -> list[Loop]:
    """Innermost loops in the order of the code, each along its shortest way."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "nvdisasm"), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    jumps = {at: labels[to] for at, x in enumerate(code) if (to := _target(x)) in labels}
    backward = [(to, at) for at, to in jumps.items() if to < at]
    inner = [
        a for a in backward if not any(b != a and a[0] <= b[0] <= b[1] <= a[1] for b in backward)
    ]
    return [_loop(_shortest(code, jumps, *ends), warps) for ends in inner]


def _target(instruction: str) -> str | None:
    found = re.search(r"BRA(?!\.DIV)\S*\s.*`\((\.L_\w+)\)", instruction)
    return found[1] if found else None


def _shortest(code: list[str], jumps: dict[int, int], first: int, last: int) -> list[str]:
    """Instructions from first to last along the way with the fewest."""
    length, before, queue = {first: 0}, {}, [(0, first)]
    while queue:
        steps, at = heapq.heappop(queue)
        following = [jumps[at]] if at in jumps else []
        if at not in jumps or code[at].startswith("@"):
            following.append(at + 1)
        for to in following:
            if first <= to <= last and steps + 1 < length.get(to, len(code)):
                length[to], before[to] = steps + 1, at
                heapq.heappush(queue, (steps + 1, to))
    way = [last]
    while way[-1] != first:
        way.append(before[way[-1]])
    return [code[at] for at in reversed(way)]


def _loop(body: Iterable[str], warps: int) -> Loop:
    names = [re.sub(r"^@!?U?P\w+\s+", "", x) for x in body]
    tensor = 8.0 * sum(x.startswith("HMMA") for x in names) * warps / 4
    for x in names:
        if shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", x):
            tensor += int(shape[1]) * int(shape[2]) * int(shape[3]) / 2048 * warps / 4
    return Loop(warps, len(names), tensor)


class Kernel(NamedTuple):
    loops: list[Loop]
    registers: int

    @property
    def products(self) -> list[Loop]:
        """Loops over tiles."""
        return [loop for loop in self.loops if loop.tensor]

    @property
    def others(self) -> list[Loop]:
        return [loop for loop in self.loops if not loop.tensor]


def kernels(device: str, dim: int = 64) -> dict[str, Kernel]:
    """Of a causal call with alpha = 1.5 in bfloat16 that keeps what a derivative needs."""
    n, heads, kv_heads = 4096, 9, 3

    def absent(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    query, key = absent(1, heads, n, dim), absent(1, kv_heads, n, dim)
    x = Arguments(
        query, key, key, absent(1, heads, n, dtype=torch.float64), scale=dim**-0.5, highest=0,
        queries=n, longest_query=n, longest_key=n, gpu=True, uniform_eps=0.5,
    )  # fmt: skip
    with compiled_for(device) as launches:
        output, *saved = launch.forward(x, True)
        launch.backward(output, x, Saved(*saved), [False] * len(TRAINED))
    return {
        c.kernel: Kernel(loops(c.code.asm["cubin"], c.code.metadata.num_warps), c.registers)
        for c in launches
    }


# ---- scores


def sparsity(name: str, scores: Tensor, seen: Tensor) -> Sparsity:
    """Of one head. scores: (query, key) before alpha; seen: bool, likewise."""
    size = configuration("sm_80", torch.bfloat16, 64)
    n, visible = len(scores), seen.sum(1)
    z = torch.where(seen, scores / 2, -torch.inf)
    lanes = z.unflatten(1, (-1, size.keys)).amax(1)  # the best key of each lane
    low = _threshold(lanes, size.steps[0])
    exact = _threshold(z, 60)
    near = z > low[:, None]
    count = near.sum(1)
    tiles = (n // size.rows, size.rows, -1, size.keys)
    active = near.view(tiles).any(3).any(1)
    present = seen.view(tiles).any(3).any(1)
    return Sparsity(
        name,
        float(visible.double().mean()),
        float(active.sum() / present.sum()),
        float((z > exact[:, None]).sum(1).double().mean()),
        float(count.double().mean()),
        float(count.view(-1, size.few).amax(1).double().mean()),
        float((count.view(-1, size.rows).amax(1) > size.capacity).double().mean()),
    )


def _threshold(z: Tensor, steps: int) -> Tensor:
    """Of sum [z - t]_+^2 = 1, from below."""
    t = z.amax(1) - 1
    for _ in range(steps):
        y = (z - t[:, None]).clamp_(min=0)
        mass, slope = y.square().sum(1), y.sum(1)
        t = t + ((mass - mass.sqrt()) / slope).clamp(min=0)
    return t


def mean(name: str, heads: list[Sparsity]) -> Sparsity:
    return Sparsity(name, *(sum(x) / len(heads) for x in list(zip(*heads, strict=True))[1:]))


# ---- the estimate

Range = tuple[float, float]


def cost(found: dict[str, Kernel], scores: Sparsity) -> dict[str, Range]:
    """Cycles of one SM per visible score, of each part: see docs/gpu.md."""
    size = configuration("sm_80", torch.bfloat16, 64)
    tile, n, sparse = size.rows * size.keys, scores.visible, 1 - scores.crowded
    bound, attend, tiles = found["bound"], found["attend"], found["attend_tiles"]
    whole = min(bound.products, key=lambda loop: loop.total).per(tile)
    search = max(bound.others, key=lambda loop: loop.total).issued * size.steps[0] / size.rows / n
    newton, gather = sorted(attend.others, key=lambda loop: loop.total)[::-1][:2]
    resident = max(1, REGISTERS // (attend.registers * 32 * gather.warps))
    pair = gather.issued / size.few, gather.issued / size.few + LATENCY / size.few / resident
    lists = newton.issued * STEPS / size.few / n
    steps, values = sorted(loop.per(tile / size.split[0]) for loop in tiles.products)[:2]
    pack = found["pack"].products[0].per(tile)
    columns = found["columns"].products[0].per(tile / size.split[1])
    rows = found["rows"].products[0].per(tile / size.split[0])
    a = scores.active
    return {
        "bound": (whole[0] + search, whole[1] + search),
        "pack": (a * pack[0], a * pack[1]),
        "lists": tuple(sparse * (lists + scores.listed / n * p) for p in pair),  # type: ignore[dict-item]
        "tiles": tuple(
            scores.crowded * a * (STEPS * s + v) for s, v in zip(steps, values, strict=True)
        ),  # type: ignore[dict-item]
        "rows": (a * rows[0], a * rows[1]),
        "columns": (a * columns[0], a * columns[1]),
    }


FORWARD = ("bound", "pack", "lists", "tiles")


def estimate(device: str, found: dict[str, Kernel], scores: Sparsity) -> dict[str, object]:
    """Ratios to FlashAttention-2's passes, low and high, ours and AdaSplash-2's."""
    parts, flash, ada = cost(found, scores), FLASH[device], ADASPLASH[device]
    one = [sum(parts[name][i] for name in FORWARD) for i in (0, 1)]
    both = [sum(part[i] for part in parts.values()) for i in (0, 1)]
    a = scores.active
    theirs = [ada["all"][i] + a * (ada["active"][i] + ada["backward"][i]) for i in (0, 1)]
    total = flash * (1 + BACKWARD)
    return {
        "device": NAMES[device],
        **scores._asdict(),
        "forward": [x / flash for x in one],
        "backward": [(x - y) / (flash * BACKWARD) for x, y in zip(both, one, strict=True)],
        "both": [x / total for x in both],
        "adasplash": [x / total for x in theirs],
        "parts": {name: list(part) for name, part in parts.items()},
    }


# ---- real scores


def recorded(folder: Path, text: str, tokens: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Queries and keys (head, token, d) of some layers of a causal model."""
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kept: list[tuple[Tensor, Tensor]] = []

    def capture(module, query, key, value, mask, **options):  # type: ignore[no-untyped-def]
        kept.append((query[0], key[0].repeat_interleave(query.shape[1] // key.shape[1], 0)))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)

    transformers.AttentionInterface.register("capture", capture)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="capture").float()
    ids = tokenizer(text[: 16 * tokens], return_tensors="pt").input_ids[:, :tokens]
    with torch.no_grad():
        model(input_ids=ids)
    return kept[:: max(1, len(kept) // 6)]


def real(folder: Path, text: str, tokens: int) -> Sparsity:
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    heads = []
    for query, key in recorded(folder, text, tokens):
        for h in range(0, len(query), 4):
            scores = query[h] @ key[h].mT * query.shape[-1] ** -0.5
            heads.append(sparsity("", scores, seen))
    return mean(f"{folder.name}, {tokens} tokens", heads)


def drawn(deviation: float, tokens: int) -> Sparsity:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, tokens, 64, generator=generator)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = deviation * query @ key.mT / 8
    return sparsity(f"random of deviation {deviation:g}, {tokens} tokens", scores, seen)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a causal model with heads of 64")
    parser.add_argument("--texts", type=Path, help="a long text for the model")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    chosen = parser.parse_args()
    scores = [drawn(1.0, 4096), drawn(4.0, 4096)]
    if chosen.model and chosen.texts:
        text = chosen.texts.read_text(encoding="utf-8")
        scores = [real(chosen.model, text, tokens) for tokens in (1024, 4096)] + scores
    results = []
    for device in FLASH:
        found = kernels(device)
        results += [estimate(device, found, each) for each in scores]
    for x in results:
        ours, theirs = x["both"], x["adasplash"]
        print(
            f"{x['device']}  {x['name']:40s} active {x['active']:.3f}"
            f"  forward {_range(x['forward'])}  backward {_range(x['backward'])}"
            f"  both {_range(ours)}  AdaSplash-2 {_range(theirs)}"
        )
    if chosen.out:
        document = {"estimate": True, "dtype": "bfloat16", "width": 64, "results": results}
        chosen.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _range(pair: object) -> str:
    low, high = pair  # type: ignore[misc]
    return f"{low:.2f}-{high:.2f}"


if __name__ == "__main__":
    main()
