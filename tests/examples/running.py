"""Runs an example in this process, and reads the numbers that it prints."""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def load(name):
    """The module of examples/<name>.py; its main() is not called."""
    if str(EXAMPLES) not in sys.path:  # they import _data by its bare name, as scripts do
        sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, *arguments):
    """What `python examples/<name>.py <arguments>` prints; the random state stays as it was."""
    printed = io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(printed):
        load(name).main([str(argument) for argument in arguments])
    return printed.getvalue()


def number(pattern, text):
    """The number that the only group of the pattern matches."""
    match = re.search(pattern, text)
    assert match, f"nothing matches {pattern!r} in:\n{text}"
    return float(match.group(1))


def row(label, text):
    """The numbers of the one line that starts with this label."""
    lines = [line for line in text.splitlines() if line.strip().startswith(label)]
    assert len(lines) == 1, f"{len(lines)} lines start with {label!r} in:\n{text}"
    rest = lines[0].strip().removeprefix(label)
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", rest)]
