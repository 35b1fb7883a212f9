"""`fenchel audit`: every head of a pretrained model, as a page, a table and a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fenchel.cli.audit_job import carry_out
from fenchel.cli.audit_settings import (
    CommandSettings,
    InputSource,
    ModelSource,
    OutputSettings,
    Resources,
    parse_measures,
)
from fenchel.cli.failures import explain_failures, say_how_to_resume
from fenchel.cli.shared import MOST_THREADS

EXAMPLE = "fenchel audit build/models/minilm --texts sentences.txt --out build/audit"

_Option = typer.Option
_Model = Annotated[str, typer.Argument(help="Folder of the model, or its name on the hub.")]
_Texts = Annotated[Path | None, _Option(help="One text per line, UTF-8; .tsv: first column.")]
_Images = Annotated[Path | None, _Option(help="Folder of images, for a vision model.")]
_Targets = Annotated[
    Path | None,
    _Option(
        help="What an encoder-decoder is to write, one line per text. (Default: its own 32 tokens)"
    ),
]
_Out = Annotated[Path, _Option(help="Folder for report, tables, figures and units.")]
_Resume = Annotated[bool, _Option("--resume", help="Go on with the units that are in --out.")]
_Layers = Annotated[
    str | None, _Option(help="Layers to audit, such as 0,3-5; from 0. (Default: all)")
]
_Heads = Annotated[str | None, _Option(help="Heads to audit, such as 0-3; from 0. (Default: all)")]
_Sample = Annotated[
    int | None, _Option(min=1, help="Number of texts to sample at random. (Default: all)")
]
_Seed = Annotated[int, _Option(min=0, help="Seed of the sample.")]
_Threads = Annotated[
    int | None,
    _Option(min=1, max=MOST_THREADS, help="Threads of each process. (Default: as torch chooses)"),
]
_Dtype = Annotated[
    str, _Option(help="Precision of the model: float32, float64, bfloat16 or float16.")
]
_Probe = Annotated[int, _Option(min=1, help="Number of texts for the slow measures.")]
_Alphas = Annotated[str, _Option(help="Alphas of entmax to try in place of softmax.")]
_Trials = Annotated[int, _Option(min=1, help="Trials of the attack on each head's bound.")]
_Tolerance = Annotated[
    float, _Option(help="How far the recipe may move an output, relative to its length.")
]
_Measures = Annotated[
    str | None,
    _Option(
        help="What to measure: weights, deviation, what_if, certificate (all texts); geometry, "
        "advantage, local, attack, model, recipe (the probe). (Default: all)"
    ),
]
_Chunk = Annotated[
    int | None, _Option(min=1, help="Items of a unit of work. (Default: 32 texts or 4 images)")
]
_Longest = Annotated[int, _Option(min=2, help="Tokens of a text at most; longer texts are cut.")]
_Trust = Annotated[
    bool, _Option("--trust-remote-code", help="Run Python code from the model's folder.")
]
_NoFigures = Annotated[
    bool, _Option("--no-figures", help="Write no PNG and SVG beside the report.")
]


def audit(
    context: typer.Context,
    model: _Model,
    out: _Out,
    texts: _Texts = None,
    images: _Images = None,
    targets: _Targets = None,
    resume: _Resume = False,
    layers: _Layers = None,
    heads: _Heads = None,
    sample: _Sample = None,
    seed: _Seed = 0,
    threads: _Threads = None,
    dtype: _Dtype = "float32",
    probe: _Probe = 32,
    alphas: _Alphas = "1.5,2",
    tolerance: _Tolerance = 0.01,
    trials: _Trials = 200,
    measures: _Measures = None,
    chunk: _Chunk = None,
    longest: _Longest = 512,
    trust_remote_code: _Trust = False,
    no_figures: _NoFigures = False,
) -> None:
    """What every head of a pretrained model does: measured, certified, and as a sparse recipe.

    Writes report.html, heads.csv, summary.json, recipe.json (for
    fenchel.hf.convert), figures/ and units/. A run that was stopped goes on
    with --resume and gives the same tables, byte for byte.

    Several processes: put accelerate launch --multi_gpu --num_processes 2 -m
    or torchrun --nproc-per-node 2 -m before the command; no GPU is needed. On
    several machines --out must be on a file system that they share. The tables
    are those of one process. If one process stops, all stop; use --resume.

    Weights are read from safetensors only, and no code of the model's folder
    runs unless you say --trust-remote-code. Needs the extras hf and report.
    """
    with explain_failures(context, lambda: say_how_to_resume(context)):
        settings = CommandSettings(
            ModelSource(model, dtype, trust_remote_code),
            InputSource(texts, images, targets, sample, seed, longest),
            OutputSettings(out, resume, not no_figures),
            Resources(chunk, threads),
            parse_measures(
                measures=measures,
                alphas=alphas,
                layers=layers,
                heads=heads,
                probe=probe,
                tolerance=tolerance,
                trials=trials,
            ),
        )
        carry_out(settings)
