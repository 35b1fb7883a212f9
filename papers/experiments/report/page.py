"""`docs/results.md`: every table with its command, seeds, cost, and whether the claim held."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import Listing
from papers.experiments.report import learning
from papers.experiments.report.maps import RULE, SCALE, has_rows
from papers.experiments.report.markdown import command, listed, plain, table
from papers.experiments.report.studies import GENERATED, PARTS, Part, title
from papers.experiments.runs import of_first
from papers.experiments.tables import Document, cost, read_results

PRESETS = ("cpu", "paper")  # what is published; smoke only shows that it runs
RESULTS = "papers/results/experiments"
SHAPES_PICTURE = "results_shapes.png"

_INTRO = f"""\
# Results

The papers' tables, trained here. These are **small networks trained on two processor cores**,
one thread a run, and not the papers' sizes: whether a claim holds for them says something about
the claim, and nothing about the papers' numbers, which stand beside for comparison.

| preset | what it is |
| --- | --- |
| `smoke` | seconds of training, to see that it runs; never published |
| `cpu` | small networks on the data that two cores can train on; the results on this page |
| `paper` | the papers' sizes, for GPUs; shown here where runs of it are stored |

A cell is the mean over seeds ± half of the 95 % interval (Student's t). A difference is between
runs of the same seed, in points of accuracy; a star marks an interval of three seeds or more that
leaves 0 out. An interval that holds 0 shows no difference, which is not the same as showing that
there is none; stars are not corrected for the number of comparisons. Every number is of the end
of a run, not of its best evaluation, and every run that is stored counts. Seconds are by the
clock, of cores that did other work beside, and do not compare the attentions. Operations are
products of matrices, convolutions and attention; what continuous attention adds, EM and integrals
of densities, is not among them: [benchmarks](benchmarks.md) have the time of a training step with
each. Rates, dropout and lengths of training were chosen by trial runs of the baseline, ViT and
discrete softmax, that looked at test accuracy.

This page is written from the files in `{RESULTS}`, and a test compares the two. The command
also draws curves of learning and maps of attention for every data set, into `build/results`:"""

_PYTHON = f"""\
## In Python

```python
from pathlib import Path

from papers.experiments.tables import read_results

for run in read_results(Path("{RESULTS}/vit/cpu")):  # scores, cost, curve, …
    run["settings"]["variant"], run["scores"], run["cost"]["seconds"]
```
"""

_MAPS = f"""\
![Test questions, and where each attention looked]({SHAPES_PICTURE})

*Where each attention looked (seed 0): the question with its answer, the picture with an outline of
what the question is about, then the maps; a green frame with ✓ is a right answer, a vermilion one
with ✗ a wrong one. {RULE} {SCALE}*"""


def page_text(results: Path) -> str:
    """The page, from the runs stored in a folder; the same files give the same page."""
    line = f"python -m papers experiment page --results {RESULTS} --out docs/results.md"
    blocks = [_INTRO, command(line)]
    for part in PARTS:
        blocks += _part(part, results)
    return "\n\n".join([*blocks, _PYTHON])


def stored(part: Part, preset: str, results: Path) -> list[Document]:
    return read_results(results / part.study / preset)


def _part(part: Part, results: Path) -> list[str]:
    blocks = [f"## {part.title}", part.intro]
    every = {preset: stored(part, preset, results) for preset in PRESETS}
    non_empty = {preset: documents for preset, documents in every.items() if documents}
    if not non_empty:
        blocks.append("No run is stored yet.")
    for preset, documents in non_empty.items():
        joint = part.joint(documents)
        blocks += [table(one._replace(title=one.title + _which(preset))) for one in joint]
    blocks += [table(listing) for listing in part.reported]
    for preset, documents in non_empty.items():
        blocks += _preset(part, preset, documents)
    for preset in PRESETS:
        for folder in sorted((results / part.study).glob(of_first(preset, "*"))):
            blocks += _first_steps(part, read_results(folder))
    remarks = "\n".join(f"- {remark}" for remark in part.remarks)
    return [*blocks, f"### Remarks on {part.source}", remarks]


def _preset(part: Part, preset: str, documents: Sequence[Document]) -> list[str]:
    blocks = []
    sets = part.sets(part.presets[preset])
    others = sorted({document["settings"]["data"] for document in documents} - sets.keys())
    for data, attentions in (sets | dict.fromkeys(others, ())).items():
        of_data = [document for document in documents if document["settings"]["data"] == data]
        blocks.append(f"### {plain(title(data))}{_which(preset)}")
        blocks += _data(part, preset, of_data, attentions) if of_data else ["No run is stored yet."]
    return blocks


def _which(preset: str) -> str:
    return "" if preset == PRESETS[0] else f" (preset {preset})"


def _data(
    part: Part, preset: str, documents: Sequence[Document], attentions: Sequence[str]
) -> list[str]:
    """All that is said of one data set; documents: of it alone."""
    data = documents[0]["settings"]["data"]
    names = part.names(documents)
    usual = [document for document in documents if document["settings"]["variant"] in names]
    said = [f"- {plain(sentence)}" for sentence in part.verdicts(documents, data)]
    blocks = ["**Did it hold?**", "\n".join(said)]
    blocks += [table(listing) for listing in part.of_data(documents, data)]
    if data == "shapes" and preset == PRESETS[0] and has_rows(documents, compact=True):
        blocks.append(_MAPS)
    blocks += [
        command(command_line(part, preset, documents, attentions)),
        f"{_seeds(part, preset, usual, attentions)} {_setting(documents)}{_note(documents)}",
    ]
    if usual:
        listings = (learning.table(usual, names, part.score), _cost(usual, names))
        blocks += [table(listing) for listing in listings]
    return blocks


def command_line(
    part: Part, preset: str, documents: Sequence[Document], attentions: Sequence[str]
) -> str:
    """What makes these runs, those beyond the preset's included."""
    data = documents[0]["settings"]["data"]
    words = [f"python -m papers experiment {part.study} --preset {preset} --sets {data}"]
    if data not in GENERATED:
        words.append("--data data")
    present = [name for name in part.names(documents) if name not in attentions]
    if present:
        words.append(f"--attention {','.join([*attentions, *present])}")
    count = 1 + max(_seed(document) for document in documents)
    if count > part.presets[preset].seeds:
        words.append(f"--seeds {count}")
    return " ".join([*words, f"--out {RESULTS}"])


def _seed(document: Document) -> int:
    return int(document["settings"]["training"]["seed"])


def _seeds(
    part: Part, preset: str, documents: Sequence[Document], attentions: Sequence[str]
) -> str:
    """Which are there, and which are missing of those that the preset wants."""
    wanted = part.presets[preset].seeds
    wanted = max(wanted, 1 + max((_seed(document) for document in documents), default=0))
    names = _called(part, [*attentions, *part.names(documents)])
    counts = dict.fromkeys(names, 0)
    for document in documents:
        counts[document["settings"]["variant"]] += 1
    if all(count == wanted for count in counts.values()):
        seeds = "seed 0" if wanted == 1 else f"seeds 0 to {wanted - 1}"
        return f"Every attention has {seeds}."
    told = "; ".join(f"{plain(names[a])}: {count}" for a, count in counts.items())
    return f"**Not all runs are stored yet.** Of {wanted} seeds there are: {told}."


def _called(part: Part, attentions: Sequence[str]) -> dict[str, str]:
    """Also of those of which no run is stored."""
    return part.names([{"settings": {"attention": attention}} for attention in attentions])


def _setting(documents: Sequence[Document]) -> str:
    settings = documents[0]["settings"]
    size, training = settings["size"], settings["training"]
    return (
        f"Width {size['width']}, {_count(size['layers'], 'layer')}, {size['heads']} heads, dropout "
        f"{size['dropout']:g}; {training['steps']:,} steps of {training['batch']} examples, a rate "
        f"of {training['rate']:g}, weight decay {training['weight_decay']:g}."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _note(documents: Sequence[Document]) -> str:
    """What is to be said of the data; runs on other data say so."""
    notes = list(dict.fromkeys(document["note"] for document in documents if document["note"]))
    return "".join(f" Data: {plain(note)}." for note in notes)


def _cost(documents: Sequence[Document], names: dict[str, str]) -> Listing:
    """Without the column of the data, which the heading names."""
    threads = sorted({document["cost"]["threads"] for document in documents})
    on = "one thread" if threads == [1] else f"{listed([str(n) for n in threads])} threads"
    pairs = dict.fromkeys(pair for document in documents for pair in document["versions"].items())
    versions = ", ".join(f"{name} {version}" for name, version in pairs)
    listing = cost(documents, f"Cost of a run on {on} ({versions})", names)
    header, *rows = ([row[0], *row[2:]] for row in (listing.header, *listing.rows))
    return Listing(listing.title, header, rows)


def _first_steps(part: Part, documents: Sequence[Document]) -> list[str]:
    """Runs that were only begun say that the size works, and what a step costs."""
    if not documents:
        return []
    preset, _, steps = documents[0]["settings"]["preset"].partition("-first-")
    said = f"Only the first steps ({steps} at most), to see that it runs: preset {preset}"
    return [table(cost(documents, said, part.names(documents)))]
