"""One training loop for every study. The randomness of a step follows from the seed and its number
alone, so that a run that is interrupted and continued gives the numbers of one that was not."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fenchel import NonFiniteError
from fenchel.lens.files import write_whole
from papers.checks import check_whole
from papers.experiments.checkpoint import (
    METRICS,
    Checkpoints,
    State,
    optimizer_tensors,
    read_metrics,
    restore_optimizer,
)
from papers.experiments.processes import accelerator, alone

Batch = dict[str, Tensor]
_SEEDS = 2**31


@dataclass(frozen=True)
class Training:
    """How a run is trained: AdamW, a linear warm-up, then a cosine to zero.

    batch: examples of a step, over all processes. precision: no, bf16 or fp16. clip: of the
    gradient's norm. patience: evaluations without a better score after which it stops; None: never.
    """

    steps: int
    batch: int
    rate: float = 3e-4
    warmup: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0
    precision: str = "no"
    evaluate_every: int = 500
    save_every: int = 200
    patience: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluate_every", "save_every"):
            check_whole(getattr(self, name), name, 1)
        for name in ("warmup", "seed"):
            check_whole(getattr(self, name), name, 0)
        if self.seed >= _SEEDS:
            raise ValueError(f"seed must be < 2^31, got {self.seed}")
        if self.patience is not None:
            check_whole(self.patience, "patience", 1)
        for name in ("rate", "clip", "weight_decay"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "weight_decay"):
                least = ">= 0" if name == "weight_decay" else "> 0"
                raise ValueError(f"{name} must be a finite number {least}, got {value!r}")
        if self.precision not in ("no", "bf16", "fp16"):
            raise ValueError(f"precision must be no, bf16 or fp16, got {self.precision!r}")

    def rate_at(self, step: int) -> float:
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (1 + math.cos(math.pi * share)) / 2


class Study(Protocol):
    """What is trained. Examples go by their number; randomness comes from the generators given."""

    def build(self) -> nn.Module:
        """The model; torch's own generator is seeded."""

    def order(self, epoch: int, batch: int, seed: int) -> list[list[int]]:
        """The batches of an epoch, of `batch` examples; a process takes consecutive ones."""

    def gathered(self, examples: Sequence[int], generator: torch.Generator) -> Batch:
        """These examples as tensors."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the batch."""

    def scores(self, model: nn.Module) -> dict[str, float]:
        """On examples that are not trained on; the first is what early stopping watches."""

    def cases(self, examples: Sequence[int]) -> list[tuple[float, Batch]]:
        """What a step of these examples can be, each with its probability: for its cost."""

    def facts(self, model: nn.Module, folder: Path) -> dict[str, Any]:
        """What is measured once, of the trained model; larger files go into the folder."""


class Diverged(ArithmeticError):
    """The loss, a gradient, a weight or an answer is no number any more."""


def finite(answers: Tensor, what: str = "answers") -> Tensor:
    """As they are; those that are no numbers would still have a largest one, and so a score."""
    if not bool(answers.isfinite().all()):
        raise Diverged(f"the network's {what} are not finite")
    return answers


@contextmanager
def naming(step: int, folder: Path) -> Iterator[None]:
    """What is found to be no number is told with the step, and with what is left."""
    try:
        yield
    except (Diverged, NonFiniteError) as problem:  # NonFiniteError: a density refuses such scores
        raise _diverged(str(problem), step, folder) from problem


def _diverged(what: str, step: int, folder: Path) -> Diverged:
    return Diverged(
        f"{what} at step {step}; the last checkpoint is kept in {folder}, but would end so again: "
        "see metrics.jsonl; another preset, or a rate of your own in Python, is another run"
    )


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves."""

    scores: dict[str, float]
    best: dict[str, float]
    steps: int
    seconds: float
    parameters: int
    model: nn.Module


def train(
    study: Study,
    training: Training,
    folder: Path,
    config: dict[str, Any],
    *,
    resume: bool = False,
    advance: Callable[[int, dict[str, float]], object] | None = None,
    say: Callable[[str], object] = print,
) -> Outcome:
    """Train to the end, or from where the folder's newest checkpoint stands.

    folder: for checkpoints and metrics.jsonl; one process at a time works in it. config: what the
    run is, as JSON can hold it; a folder with another one is refused. advance: called after each
    step with its number and its last numbers.
    """
    with alone(folder):
        return trained(study, training, folder, config, resume=resume, advance=advance, say=say)


def trained(
    study: Study,
    training: Training,
    folder: Path,
    config: dict[str, Any],
    *,
    resume: bool,
    advance: Callable[[int, dict[str, float]], object] | None,
    say: Callable[[str], object],
) -> Outcome:
    """As `train`, for one who holds the folder's lock."""
    run = _Run(study, training, Checkpoints(folder, config | {"training": asdict(training)}), say)
    run.begin(resume)
    end = run.step if run.done else training.steps  # one that stopped early stays as it is
    for step in range(run.step, end):
        numbers = run.advance(step)
        if advance is not None:
            advance(step + 1, numbers)
        if run.done:
            break
    return run.finish()


class _Run:
    def __init__(
        self,
        study: Study,
        training: Training,
        checkpoints: Checkpoints,
        say: Callable[[str], object],
    ) -> None:
        self.study, self.training, self.checkpoints = study, training, checkpoints
        self.say = say
        self.accelerator = accelerator(training.precision)
        torch.manual_seed(training.seed)
        self.bare = study.build()
        optimizer = torch.optim.AdamW(  # fused: a tenth of a small step less
            self.bare.parameters(), training.rate, weight_decay=training.weight_decay, fused=True
        )
        self.model, self.optimizer = self.accelerator.prepare(self.bare, optimizer)
        self.step, self.spent = 0, 0.0
        self.best: dict[str, float] = {}
        self.since_best = 0
        self.scores: dict[str, float] = {}
        self.done = False
        self.epoch: tuple[int, list[list[int]]] = (-1, [])
        self.curve = bytearray()  # all lines of metrics.jsonl

    # ---- where it stands

    def begin(self, resume: bool) -> None:
        with self.accelerator.main_process_first():  # it sets damaged checkpoints aside
            others = self.checkpoints.open(resume) if self.accelerator.is_main_process else []
            state, aside = self.checkpoints.newest() if resume else (None, [])
        for path in others:
            self._tell(f"{path.name} is of other settings, or does not say of which: not used")
        for name in dict.fromkeys(path.name.split(".")[0] for path in aside):
            self._tell(f"{name} does not match its checksum: set aside")
        if state is None and (others or aside):
            self._tell("beginning anew")
        if state is not None:
            self._restore(state)
            self._tell(f"going on at step {self.step} of {self.training.steps}")
        self._check_together()
        self._write_metrics()  # steps after the checkpoint are made again
        self.started = time.monotonic()

    def _check_together(self) -> None:
        """Machines with folders of their own would train different networks as if they were one."""
        step = torch.tensor([self.step], device=self.accelerator.device)
        steps = sorted(set(self.accelerator.gather(step).tolist()))
        if len(steps) > 1:
            told = ", ".join(map(str, steps))
            raise ValueError(
                f"the processes of the run in {self.checkpoints.folder} stand at different steps: "
                f"{told}; give an --out on a disk that all machines share"
            )

    def _restore(self, state: State) -> None:
        weights = {
            k.removeprefix("model."): v for k, v in state.tensors.items() if k[:6] == "model."
        }
        self.bare.load_state_dict(weights)
        rest = {k.removeprefix("adam."): v for k, v in state.tensors.items() if k[:5] == "adam."}
        restore_optimizer(self.optimizer.optimizer, rest)
        self.step, facts = state.step, state.facts
        self.curve = bytearray(state.curve or self._curve_of_the_file())
        self.best, self.since_best = facts["best"], facts["since_best"]
        self.scores, self.spent, self.done = facts["scores"], facts["seconds"], facts["done"]
        if self.accelerator.scaler is not None and "scaler" in facts:
            self.accelerator.scaler.load_state_dict(facts["scaler"])

    def _curve_of_the_file(self) -> bytes:
        """For a checkpoint of an older version, which does not hold its curve."""
        lines = [line for line in read_metrics(self._metrics.parent) if line["step"] <= self.step]
        if [line["step"] for line in lines] != list(range(1, self.step + 1)):
            raise ValueError(
                f"{self._metrics} does not hold steps 1 to {self.step}, which the checkpoint has "
                "behind it; put it back, or begin again with --again"
            )
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    def save(self) -> None:
        self._check_weights()
        if not self.accelerator.is_main_process:
            return
        tensors = {f"model.{name}": x.detach() for name, x in self.bare.state_dict().items()}
        tensors |= {f"adam.{k}": v for k, v in optimizer_tensors(self.optimizer.optimizer).items()}
        facts = {
            "best": self.best,
            "since_best": self.since_best,
            "scores": self.scores,
            "seconds": self.spent + time.monotonic() - self.started,
            "done": self.done,
        }
        if self.accelerator.scaler is not None:  # of the loss in fp16
            facts["scaler"] = self.accelerator.scaler.state_dict()
        self.checkpoints.save(State(self.step, tensors, facts, curve=bytes(self.curve)))

    def _check_weights(self) -> None:
        moments = optimizer_tensors(self.optimizer.optimizer).values()
        with naming(self.step, self.checkpoints.folder):
            for x in (*self.bare.parameters(), *moments):
                finite(x, "weights")

    # ---- steps

    def advance(self, step: int) -> dict[str, float]:
        """One step; evaluated and saved where it is due."""
        training = self.training
        torch.manual_seed(_mixed(training.seed, step, self.accelerator.process_index))
        numbers = {"loss": self._trained(step), "rate": training.rate_at(step)}
        self.step = step + 1
        if self.step % training.evaluate_every == 0 or self.step == training.steps:
            self._evaluated()
            numbers |= self.scores
        self._note(numbers)
        if self.step % training.save_every == 0 or self.step == training.steps or self.done:
            self.save()
        return numbers

    def _trained(self, step: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate_at(step)
        self.model.train()
        loss = self._loss(self._part(step))
        value = float(self.accelerator.reduce(loss.detach(), "mean"))
        if not math.isfinite(value):
            raise _diverged(f"the loss is {value}", step + 1, self.checkpoints.folder)
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.training.clip)
        # In fp16 a step whose gradient is infinite is left out, and the loss scaled down.
        if self.training.precision != "fp16" and norm is not None and not math.isfinite(norm):
            what = f"the norm of the gradient is {float(norm)}"
            raise _diverged(what, step + 1, self.checkpoints.folder)
        self.optimizer.step()
        return value

    def _loss(self, part: Batch) -> Tensor:
        """NaN where a density refuses its scores, so that all processes learn of it."""
        try:
            return self.study.loss(self.model, part)
        except NonFiniteError:
            return torch.full((), math.nan, device=self.accelerator.device)

    def _part(self, step: int) -> Batch:
        """This process's share of the step's batch."""
        examples = self._examples(step)
        count, rank = self.accelerator.num_processes, self.accelerator.process_index
        if len(examples) % count:
            raise ValueError(f"a batch of {len(examples)} does not divide by {count} processes")
        size = len(examples) // count
        generator = torch.Generator().manual_seed(_mixed(self.training.seed, step, -1))
        part = self.study.gathered(examples[rank * size : (rank + 1) * size], generator)
        return {name: value.to(self.accelerator.device) for name, value in part.items()}

    def _examples(self, step: int) -> list[int]:
        training = self.training
        if self.epoch[0] < 0:
            self.epoch = (0, self.study.order(0, training.batch, training.seed))
        length = len(self.epoch[1])
        number, place = divmod(step, length)
        if number != self.epoch[0]:
            self.epoch = (number, self.study.order(number, training.batch, training.seed))
        return self.epoch[1][place]

    def _evaluated(self) -> None:
        self.model.eval()
        with torch.no_grad(), naming(self.step, self.checkpoints.folder):
            self.scores = self.study.scores(self.bare)
            finite(torch.tensor(list(self.scores.values()), dtype=torch.float64), "scores")
        watched = next(iter(self.scores))
        if not self.best or self.scores[watched] > self.best[watched]:
            self.best, self.since_best = dict(self.scores), 0
        else:
            self.since_best += 1
        patience = self.training.patience
        self.done = patience is not None and self.since_best >= patience

    def finish(self) -> Outcome:
        self._check_weights()  # a checkpoint of an older version may hold what is none
        self._write_metrics()
        seconds = self.spent + time.monotonic() - self.started
        count = sum(x.numel() for x in self.bare.parameters())
        self.accelerator.wait_for_everyone()
        return Outcome(self.scores, self.best, self.step, seconds, count, self.bare)

    # ---- what it says

    def _note(self, numbers: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            line = (json.dumps({"step": self.step, **numbers}) + "\n").encode()
            self.curve += line
            with self._metrics.open("ab") as file:
                file.write(line)

    def _write_metrics(self) -> None:
        """Whatever became of the file."""
        if self.accelerator.is_main_process:
            write_whole(self._metrics, bytes(self.curve))

    @property
    def _metrics(self) -> Path:
        return self.checkpoints.folder / METRICS

    def _tell(self, text: str) -> None:
        if self.accelerator.is_main_process:
            self.say(text)


def _mixed(seed: int, step: int, process: int) -> int:
    """One number for each, far apart."""
    return (seed * 1_000_003 + step * 7_919 + process * 104_729) % (2**63)
