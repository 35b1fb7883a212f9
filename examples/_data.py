"""What the examples share: common options, where data and models lie, a progress bar.

Nothing here is about attention; read the numbered scripts first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

ROOT = Path(__file__).resolve().parents[1]
Item = TypeVar("Item")


def shared_data() -> Path:
    """The folder `data` of $FENCHEL_SHARED, or of `shared` beside the repository."""
    return Path(os.environ.get("FENCHEL_SHARED") or ROOT.parent / "shared") / "data"


def parser(
    text: str, example: str, *, seed: bool = True, quick: bool = True
) -> argparse.ArgumentParser:
    """text: the script's docstring. seed, quick: whether it has these options; who trains does."""
    made = argparse.ArgumentParser(
        description=text,
        epilog=f"example: python {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if seed:
        made.add_argument("--seed", type=int, default=0, help="of every random choice (0)")
    if quick:
        made.add_argument("--quick", action="store_true", help="a short run, of seconds")
    return made


def add_steps(made: argparse.ArgumentParser, usual: int, quick: int) -> None:
    """--steps, for those that train; ask `steps_of` for the number."""
    text = f"of the optimiser ({usual}; with --quick {quick})"
    made.add_argument("--steps", type=_positive, metavar="N", help=text)
    made.set_defaults(usual_steps=usual, quick_steps=quick)


def steps_of(args: argparse.Namespace) -> int:
    """What --steps says, or else what is usual."""
    if args.steps is not None:
        return int(args.steps)
    return int(args.quick_steps if args.quick else args.usual_steps)


def add_data(made: argparse.ArgumentParser) -> None:
    """--data FOLDER."""
    text = "real data ($FENCHEL_SHARED/data, or ../shared/data beside the repository)"
    made.add_argument("--data", type=Path, default=shared_data(), metavar="FOLDER", help=text)


def add_model(made: argparse.ArgumentParser) -> None:
    """--model FOLDER."""
    text = "all-MiniLM-L6-v2 (build/models/minilm, which `make demo` fetches)"
    folder = ROOT / "build" / "models" / "minilm"
    made.add_argument("--model", type=Path, default=folder, metavar="FOLDER", help=text)


def add_out(made: argparse.ArgumentParser, name: str) -> None:
    """--out FILE; give it to `picture` before it is written."""
    text = f"where the picture goes (build/examples/{name})"
    usual = ROOT / "build" / "examples" / name
    made.add_argument("--out", type=Path, default=usual, metavar="FILE", help=text)


def picture(path: Path) -> Path:
    """The same path, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def found(path: Path, instead: str) -> bool:
    """Is it there? If not, a line says what is used instead: `a generated text`."""
    if path.exists():
        return True
    print(f"{path} is not there: {instead} takes its place")
    return False


def absent(path: Path, way_out: str) -> NoReturn:
    """Ends the example with exit code 2."""
    print(f"{path} is not there; {way_out}", file=sys.stderr)
    raise SystemExit(2)


def need_model(folder: Path) -> None:
    """Ends the example with exit code 2 where there is no model in the folder."""
    if not (folder / "config.json").is_file():
        absent(folder / "config.json", "run `make demo`, which fetches it, or give --model FOLDER")


def track(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """The items, with a progress bar on standard error while it is a terminal."""
    from rich.console import Console
    from rich.progress import track as bar

    console = Console(stderr=True)
    yield from bar(
        items, what, total, console=console, transient=True, disable=not console.is_terminal
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
