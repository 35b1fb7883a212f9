"""What an audit leaves: tables, a page, figures, and a few lines on the terminal."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fenchel.cli.audit_settings import OutputSettings
from fenchel.cli.messages import Messages

if TYPE_CHECKING:
    from fenchel.lens.document import Document, Summary
    from fenchel.lens.heads.table import Audit

_FIGURE = re.compile(
    r"(what_if|(map|agreement|entropy_histograms|top_weight_histograms|spectra|preference|recipe)"
    r"_(encoder|decoder|cross)[\w.]*)\.(png|svg)"
)

# Columns of the first alpha and of others; those that were not measured are left out.
_HEADLINES = {
    "entropy_share": "entropy, of that of even weights",
    "mass_first": "weight on the first token",
    "token_deviation_mean": "deviation from the exact estimate, token space",
    "head_deviation_mean": "deviation from the exact estimate, head space",
    "kept_{}": "links kept by entmax-{}",
    "layer_moved_{}": "layer's output moved by it",
    "bound": "certified bound, query to output",
    "tightness": "certificate over strongest attack",
    "recipe_alpha": "alpha of the recipe",
}


def check_writable(folder: Path) -> None:
    """Before the work, so that nobody waits an hour for an error."""
    from fenchel.lens.files import write_whole

    probe = folder / f".writable.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(probe, b"")
        probe.unlink()
    except FileExistsError:
        raise NotADirectoryError(f"--out {folder} is a file; give a folder") from None
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            raise
        raise PermissionError(
            f"cannot write into {folder} ({problem.strerror}); give another folder with --out, or "
            "make this one writable"
        ) from None


def write_audit(audit: Audit, output: OutputSettings, messages: Messages) -> None:
    """Each file whole or not at all; what an earlier run left is replaced."""
    from fenchel.lens.files import write_whole
    from fenchel.lens.page import write

    folder = output.folder
    recipe, summary, document = audit.recipe(), audit.summary(), audit.document()
    write_whole(folder / "heads.csv", audit.to_csv().encode())
    write_whole(folder / "summary.json", _encode(summary.to_json()))
    if recipe is None:
        (folder / "recipe.json").unlink(missing_ok=True)
    else:
        write_whole(folder / "recipe.json", _encode(recipe))
    page = write(document, folder)
    _clear_figures(folder)
    if output.figures:
        _draw(document, folder, messages)
    _print_summary(summary, messages)
    typer.echo(page)


def _draw(document: Document, folder: Path, messages: Messages) -> None:
    from fenchel.lens.page import save_figures

    with messages.bar("figures", total=1.0) as bar:
        try:
            save_figures(document, folder, bar.advance)
        except BaseException:
            _clear_figures(folder)  # the last may be half-written
            raise


def _clear_figures(folder: Path) -> None:
    """Those of an earlier run, which may have had others; whatever else is there stays."""
    for old in (folder / "figures").glob("*.*"):
        if _FIGURE.fullmatch(old.name):
            old.unlink()


def _print_summary(summary: Summary, messages: Messages) -> None:
    inputs = summary.inputs
    title = Text(f"{summary.model.name}: {summary.heads} heads")
    table = Table(title=title, title_justify="left")
    table.add_column(f"{inputs.count} {inputs.what}")
    for name in ("median", "least", "largest"):
        table.add_column(name, justify="right")
    alpha = f"{summary.settings.alphas[0]:g}"
    for name, words in _HEADLINES.items():
        spread = summary.columns.get(name.format(alpha))
        if spread is not None:
            numbers = (spread.median, spread.least, spread.largest)
            table.add_row(words.format(alpha), *map(_format, numbers))
    Console().print(table)
    if inputs.truncated:
        messages.say(
            f"{inputs.truncated} of {inputs.count} texts were longer than the model or --longest "
            "allows and were cut"
        )


def _encode(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
