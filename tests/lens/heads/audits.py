"""Calls of `fenchel audit` on small models, and checks of how they end."""

from contextlib import contextmanager

import torch
from PIL import Image
from typer.testing import CliRunner

from fenchel.cli import app
from tests.lens.heads import folders

TEXTS = ["a b c d", "e f", "g h i j k", "a a b", "c", "d e f g h i", "b", "k l m", "n o p q r"]
TABLES = ("heads.csv", "summary.json", "recipe.json")
QUICK = ("--measures", "weights,what_if", "--no-figures", "--chunk", "2")
MANY = ("--measures", "weights,what_if,certificate,geometry,model,recipe", "--no-figures")
MANY = (*MANY, "--chunk", "1", "--probe", "2")


def write_inputs(base, models):
    """Small models of these kinds, texts and images in the folder, which is returned."""
    for name in models:
        folders.save(name, base / name)
    (base / "texts.txt").write_text("\n".join(TEXTS))
    (base / "few.txt").write_text("x y\n" * len(TEXTS))
    (base / "images").mkdir()
    for number in range(3):
        Image.new("RGB", (16, 16), (80 * number, 90, 20)).save(base / f"images/{number}.png")
    return base


@contextmanager
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def arguments(base, out, *more, model="bert"):
    shown = ("--images", base / "images") if model == "vit" else ("--texts", base / "texts.txt")
    given = () if "--texts" in more or "--images" in more else shown
    return [str(word) for word in ("audit", base / model, *given, "--out", out, *more)]


def run(base, out, *more, model="bert"):
    return CliRunner().invoke(app, arguments(base, out, *more, model=model))


def assert_succeeds(*given, **more):
    result = run(*given, **more)
    assert result.exit_code == 0, result.output
    return result


def assert_refused(code, said, *given, **more):
    result = run(*given, **more)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert said in result.stderr
    return result


def tables(out):
    return [(out / name).read_bytes() if (out / name).exists() else None for name in TABLES]
