"""`python -m benchmarks gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import TaskProgressColumn

from benchmarks import gpu, gpu_speed
from benchmarks.console import shares
from benchmarks.tables import Listing, pipes
from fenchel.cli.shared import check_folder, progress_bar

EXAMPLE = "python -m benchmarks gpu --interpret"
_INTERPRET = "TRITON_INTERPRET"
_RESULTS = Path("results")
_NO_DEVICE = (
    "no CUDA device is here; `python -m benchmarks gpu --interpret` checks the kernels in triton's "
    "interpreter on CPU tensors"
)
_NO_TRITON = 'triton is not installed: pip install --no-deps "triton==3.7.1"'


def bench_gpu(
    interpret: Annotated[
        bool,
        typer.Option(
            "--interpret",
            help="Without a device: parity alone, at tiny sizes, in triton's interpreter on CPU "
            "tensors. Writes no file; half a minute.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Where the figures go, as JSON. (Default: results/gpu-DEVICE.json)",
        ),
    ] = None,
) -> None:
    """Check the GPU's kernels against float64 on a CUDA device, then time them against SDPA.

    fl.attention with Tsallis 1.5, 2 and 1.3, forward and backward, in three precisions; then
    times beside FlashAttention, FlexAttention and, where it is installed, AdaSplash, at 1,024 to
    16,384 tokens. It aims at ten minutes. A failed check exits with 1, and nothing is timed. What
    needs a device was never run on one unless results/ holds a file gpu-DEVICE.json.
    """
    if interpret:
        if out is not None:
            raise typer.BadParameter("--interpret writes no file", param_hint="--out")
        _interpret()
        return
    if out is not None:
        check_folder(out.parent)
    problem = _why_not()
    if problem is not None:
        typer.echo(problem, err=True)
        raise typer.Exit(1)
    _run_on_device(out)


def _why_not() -> str | None:
    """What keeps this process from running on a device."""
    if not torch.cuda.is_available():
        return _NO_DEVICE
    if not gpu.has_triton():
        return _NO_TRITON
    if os.environ.get(_INTERPRET):
        return f"{_INTERPRET} is set, so that nothing runs on the device: unset it"
    return None


def _interpret() -> None:
    """In a process that has the variable before triton is imported: this one, or a child."""
    if not gpu.has_triton():
        typer.echo(_NO_TRITON, err=True)
        raise typer.Exit(1)
    if os.environ.get(_INTERPRET) != "1":
        command = [sys.executable, "-m", "benchmarks", "gpu", "--interpret"]
        done = subprocess.run(command, env={**os.environ, _INTERPRET: "1"}, check=False)
        raise typer.Exit(done.returncode)
    with progress_bar(TaskProgressColumn()) as progress:
        report = gpu.run_interpreted(gpu.INTERPRETED, shares(progress))
    _tell(report.as_json())
    _judge(report)


def _run_on_device(out: Path | None) -> None:
    name = torch.cuda.get_device_name()
    path = out or _RESULTS / gpu.file_name(name)
    check_folder(path.parent)
    with progress_bar(TaskProgressColumn()) as progress:
        report = gpu.run(gpu.FULL, gpu_speed.cuda(), name, shares(progress))
    document = report.as_json()
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _tell(document)
    typer.echo(path)
    _judge(report)
    if out is None:
        typer.echo(
            f'To contribute it: add ("{name}", "{path.as_posix()}") to DEVICES_RUN in '
            "src/fenchel/_kernels/gpu/devices_run.py, and send both."
        )


def _tell(document: dict[str, Any]) -> None:
    """As Markdown, to be pasted."""
    for listing in gpu.listings(document):
        typer.echo(_markdown(listing))
    for words in document["left_out"]:
        typer.echo(f"Left out: {words}.\n")


def _markdown(listing: Listing) -> str:
    rows = [[cell.replace("|", r"\|") for cell in row] for row in listing.rows]
    return f"**{listing.title}**\n\n{pipes(listing.header, rows, listing.words)}\n"


def _judge(report: gpu.Report) -> None:
    if report.failures:
        wrong = f"{report.failures} of {len(report.outcomes)} cases are wrong"
        typer.echo(f"{wrong}: please report the table above as an issue", err=True)
        raise typer.Exit(1)
