"""What can go wrong in a long command, as one message with the way out, and the exit code."""

from __future__ import annotations

import errno
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from fenchel.lens.launcher import check_environment, rank, world_size

_USAGE, _ENVIRONMENT, _INTERRUPTED = 2, 1, 130
_ABOUT_INPUT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError)


@contextmanager
def explain_unsupported(model: Any) -> Iterator[None]:
    """The first text shows whether the model can be audited; ValueError says itself why not."""
    try:
        yield
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError) as problem:
        raise ValueError(
            f"{type(model).__name__} cannot be audited: {type(problem).__name__}: {problem}. "
            "Looked for an encoder or decoder of texts, an encoder-decoder, or a vision "
            "transformer, as in BERT, GPT-2, Llama, T5, BART and ViT"
        ) from problem


@contextmanager
def explain_failures(context: typer.Context, go_on: Callable[[], str]) -> Iterator[None]:
    """Every failure of input, disk or network as one message, with the way out; go_on: what to do
    to continue."""
    try:
        with _interrupt_on_sigterm():
            check_environment()
            yield
    except KeyboardInterrupt:
        _leave(context, f"stopped; what is stored is kept. {go_on()}", _INTERRUPTED)
    except ConnectionError as problem:  # to another process of the run
        _leave(context, f"{problem}. What is stored is kept. {go_on()}", _ENVIRONMENT)
    except _ABOUT_INPUT as problem:
        _leave(context, str(problem), _USAGE)
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            _leave(
                context,
                f"the disk is full ({context.params['out']}); what is stored is kept. Make room. "
                f"{go_on()}",
                _ENVIRONMENT,
            )
        _leave(context, str(problem), _ENVIRONMENT)
    except (ArithmeticError, ImportError) as problem:
        _leave(context, str(problem), _ENVIRONMENT)


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """What schedulers send stops a run as a person does. Only the main thread hears signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(context: typer.Context, message: str, code: int) -> NoReturn:
    print(f"{context.command_path}: {_speaker()}{message}", file=sys.stderr)
    raise typer.Exit(code)


def _speaker() -> str:
    """Which process of several says it."""
    try:
        number = rank()
    except ValueError:  # the message says that
        return ""
    return f"process {number}: " if number else ""


def say_how_to_resume(context: typer.Context) -> str:
    """What to type; the launcher of several processes is not known here."""
    words = ["fenchel", "audit", str(context.params["model"])]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if option.name in ("model", "resume") or value is None or value == option.default:
            continue
        words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    started = " (started by the same launcher)" if world_size() > 1 else ""
    return f"To go on{started}: {shlex.join([*words, '--resume'])}"
