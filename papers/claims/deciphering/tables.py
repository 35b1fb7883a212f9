"""Tables 1 and 2 of paper D: vision transformers with softmax and with transport in the last layer.
What is printed there, as intervals, and beside it our own runs where they are stored."""

from __future__ import annotations

from pathlib import Path

from benchmarks.extras import INSTALL
from papers.claims.evidence import Evidence
from papers.claims.ledger import claim
from papers.claims.verdicts import Verdict
from papers.experiments import statistics

Printed = dict[str, tuple[tuple[float, float], tuple[float, float]]]  # (accuracy, half), ViT first

BY_RATE: Printed = {  # on CIFAR-100
    "0.003": ((0.228, 0.01), (0.175, 0.01)),
    "0.0003": ((0.463, 0.01), (0.491, 0.01)),
    "0.00003": ((0.452, 0.01), (0.412, 0.01)),
}
BY_DATA: Printed = {
    "Fashion-MNIST": ((0.928, 0.01), (0.937, 0.01)),
    "CIFAR-10": ((0.751, 0.01), (0.772, 0.02)),
    "CIFAR-100": ((0.463, 0.01), (0.491, 0.01)),
}
_RUNS = 2  # at least so many make an interval; the paper does not say how many it made
_EXACT = 1e-12


def _difference(table: Printed, column: str) -> statistics.Estimate:
    """OT-ViT − ViT. Its interval is the sum of both, which leaves zero out where they are
    disjoint."""
    vit, transport = table[column]
    return statistics.Estimate(transport[0] - vit[0], transport[1] + vit[1], _RUNS)


@claim(
    "D-Tab1",
    "CIFAR-100 by learning rate: both networks are best at 0.0003, and there OT-ViT is better",
    Verdict.NOT_CHECKABLE,
)
def accuracy_by_rate(evidence: Evidence) -> None:
    wanted = {"0.003": -0.053, "0.0003": 0.028, "0.00003": -0.040}
    for rate, points in wanted.items():
        difference = _difference(BY_RATE, rate).mean
        evidence.near(f"OT-ViT − ViT at the rate {rate}, as printed", difference, points, _EXACT)
    apart = sum(_difference(BY_RATE, rate).beyond_zero for rate in BY_RATE)
    evidence.near("rates at which the printed 95 % intervals are disjoint", apart, 3, 0)
    for which, name in enumerate(("ViT", "OT-ViT")):
        best = BY_RATE["0.0003"][which][0]
        lead = [best - BY_RATE[rate][which][0] for rate in BY_RATE if rate != "0.0003"]
        evidence.above(f"lead of the rate 0.0003 over the others, {name}", lead, _EXACT)
    evidence.note(
        "The accuracies come from training on CIFAR-100; only the arithmetic on the printed table "
        "is checked. OT-ViT is worse than ViT at two of the three rates."
    )
    _our_runs(evidence, "paper", ("cifar-100",))


@claim(
    "D-Tab2",
    "OT-ViT consistently outperforms ViT: test accuracy on three data sets, with 95 % intervals",
    Verdict.CORRECTED,
)
def accuracy_by_data(evidence: Evidence) -> None:
    differences = {name: _difference(BY_DATA, name) for name in BY_DATA}
    disjoint = [name for name, each in differences.items() if each.beyond_zero]
    evidence.near("data sets with disjoint 95 % intervals", len(disjoint), 1, 0)
    evidence.near("of them CIFAR-100", disjoint.count("CIFAR-100"), 1, 0)
    means = [each.mean for each in differences.values()]
    evidence.above("least difference of the means, OT-ViT − ViT", means, 0.0)
    margins = [each.mean - (each.half or 0.0) for each in differences.values()]
    evidence.printed_above(
        "consistently outperforms: least distance between the intervals", margins, 0.0
    )
    rooted = [name for name in BY_DATA if _rooted(name).beyond_zero]
    evidence.near(
        "data sets where an interval of the difference, √(h₁² + h₂²), leaves zero out",
        len(rooted),
        1,
        0,
    )
    evidence.correction = (
        "The means are higher on all three data sets, but the printed 95 % intervals overlap on "
        "Fashion-MNIST and CIFAR-10; only on CIFAR-100 are they disjoint."
    )
    evidence.note(
        "Half-widths are printed to one digit: ± 0.01 may be anything from 0.005 to 0.015, with "
        "which the intervals may meet on CIFAR-100 and part on CIFAR-10."
    )
    _our_runs(evidence, "cpu", ("fashion-mnist", "cifar-10"))


def _rooted(name: str) -> statistics.Estimate:
    """The interval of a difference of two independent means, to a normal approximation."""
    vit, transport = BY_DATA[name]
    half = (vit[1] ** 2 + transport[1] ** 2) ** 0.5
    return statistics.Estimate(transport[0] - vit[0], half, _RUNS)


# ---- our own


def _our_runs(evidence: Evidence, preset: str, sets: tuple[str, ...]) -> None:
    """A note for each data set: what the stored runs say, or how to make them."""
    command = f"python -m papers experiment vit --preset {preset} --out papers/results/experiments"
    said = [] if evidence.results is None else _stored(evidence.results / "vit" / preset, sets)
    if not said:
        said = [f"none is stored for the preset {preset}"]
    for words in said:
        evidence.note(f"Our own runs: {words}; `{command}`.")


def _stored(folder: Path, sets: tuple[str, ...]) -> list[str]:
    try:
        from papers.experiments.tables import by_seed, read_results
        from papers.experiments.vit.tables import accuracy
    except ModuleNotFoundError as missing:
        return [f"{missing.name} is missing; {INSTALL}"]
    try:
        documents = read_results(folder)
    except ValueError as problem:
        return [f"they cannot be read: {problem}"]
    lines = []
    for data in sets:
        vit, transport = (
            by_seed(documents, accuracy, data=data, variant=name)
            for name in ("softmax", "transport")
        )
        if statistics.paired(transport, vit) is not None:
            lines.append(f"{data}, {_compared(vit, transport)}")
    return lines


def _compared(vit: dict[int, float], transport: dict[int, float]) -> str:
    seeds = sorted(vit.keys() & transport.keys())
    one, other = (statistics.estimate([x[seed] for seed in seeds]) for x in (vit, transport))
    apart = statistics.paired(transport, vit)
    assert apart is not None
    interval = "" if apart.half is None else f" ± {100 * apart.half:.2f} (95 % interval)"
    count = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return (
        f"ViT {100 * one.mean:.2f} %, OT-ViT {100 * other.mean:.2f} %, paired difference "
        f"{100 * apart.mean:+.2f}{interval} points, {count}"
    )
