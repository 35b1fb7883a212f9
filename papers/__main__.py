"""`python -m papers`: the claims, the experiments, the studies and the tour."""

from __future__ import annotations

import typer

from fenchel.cli.shared import replace_letters
from papers.claims import command as claims
from papers.experiments import command as experiment
from papers.studies import command as study
from papers.tour import command as tour

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    epilog="Example: python -m papers claims --id L-5",
)


@app.callback()
def root() -> None:
    """The papers that fenchel stands on: claims, experiments, studies, and the tour."""
    replace_letters()


app.command("claims", epilog=f"Example: {claims.EXAMPLE}")(claims.claims)
app.add_typer(experiment.commands, name="experiment", help="The papers' tables, trained here.")
app.add_typer(study.commands, name="study", help="What measures and distances say of a model.")
app.command("tour", epilog=f"Example: {tour.EXAMPLE}")(tour.tour)

if __name__ == "__main__":
    app(prog_name="python -m papers")
