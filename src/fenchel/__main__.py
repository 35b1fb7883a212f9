"""`python -m fenchel` and the `fenchel` command."""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich", "matplotlib", "jinja2")


def main() -> None:
    """Run the command line, or say which packages it lacks."""
    try:
        from fenchel.cli import app

        app()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        print(
            f"the fenchel command needs the package {package!r}, which is not installed; "
            'run, in a clone: pip install -c constraints.txt ".[report]"',
            file=sys.stderr,
        )
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
