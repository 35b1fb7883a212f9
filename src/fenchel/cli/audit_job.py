"""The audit as the command carries it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fenchel.cli.audit_files import check_writable, write_audit
from fenchel.cli.audit_settings import CommandSettings, InputSource
from fenchel.cli.failures import explain_unsupported
from fenchel.cli.messages import Bar, Messages

if TYPE_CHECKING:
    from fenchel.lens.heads.auditing import AuditRun, WorkUnit
    from fenchel.lens.heads.datasets import Images, Texts
    from fenchel.lens.heads.processes import Team
    from fenchel.lens.heads.settings import ExecutionSettings
    from fenchel.lens.heads.store import Store
    from fenchel.lens.heads.table import Audit


def carry_out(settings: CommandSettings) -> None:
    """All of it: the model, its inputs, the audit, and the files."""
    from fenchel.lens.heads.processes import join_team

    check_writable(settings.output.folder)
    with join_team() as team, _threads(settings.resources.threads):
        messages = Messages(team.is_main)
        if team.is_main:
            _check_report_packages()
        audit = _Job(settings, team, messages).run()
    if audit is not None:
        write_audit(audit, settings.output, messages)


def _check_report_packages() -> None:
    """A package that is missing is named before the work."""
    from fenchel.lens.page import save_figures, write  # noqa: F401


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Job:
    """The share of one process in an audit."""

    settings: CommandSettings
    team: Team
    messages: Messages

    def run(self) -> Audit | None:
        """The audit, of the main process."""
        from fenchel.lens.heads.processes import carry_out as count_units

        run, store = self._prepare()
        execution = self._execution()
        if not self.settings.output.resume and self.team.is_main and store.names():
            self.messages.say(
                f"beginning again: the {len(store.names())} units of an earlier run in "
                f"{store.folder} go (--resume would go on with them)"
            )
        with self.messages.bar("units") as bar:
            audit = count_units(
                run,
                self.team,
                self.settings.output.resume,
                lambda units, stored: self._begin(bar, store, units, stored),
                lambda unit: bar.finish_unit(unit.name, unit.cost),
            )
        return None if audit is None else run.add_execution(audit, execution)

    def _prepare(self) -> tuple[AuditRun, Store]:
        from fenchel.lens.heads.auditing import AuditRun
        from fenchel.lens.heads.fingerprints import describe_run
        from fenchel.lens.heads.store import Store
        from fenchel.lens.loading import load

        source = self.settings.model
        with self.messages.status(f"loading {source.name}"):
            model, reader = load(source.name, source.dtype, source.trust_remote_code)
        dataset = _read(self.settings.inputs, model, reader)
        audit, execution = self.settings.audit, self._execution()
        folder = self.settings.output.folder / "units"
        store = Store(folder, describe_run(model, dataset, audit, execution))
        with explain_unsupported(model):
            return AuditRun(model, dataset, audit, self.settings.chunk, store), store

    def _execution(self) -> ExecutionSettings:
        import torch

        from fenchel.lens.heads.settings import ExecutionSettings

        return ExecutionSettings(
            chunk=self.settings.chunk,
            longest=self.settings.inputs.longest,
            dtype=self.settings.model.dtype,
            threads=torch.get_num_threads(),
        )

    def _begin(self, bar: Bar, store: Store, units: Sequence[WorkUnit], stored: set[str]) -> None:
        """What is stored already is done at once; the bar counts the units of this process."""
        share = [unit for number, unit in enumerate(units) if self.team.takes(number)]
        done = sum(unit.cost for unit in share if unit.name in stored)
        bar.begin(sum(unit.cost for unit in share), done)
        for path in store.set_aside:
            self.messages.say(f"{path} was damaged: set aside, and its unit is made again")
        if self.settings.output.resume:
            self.messages.say(f"going on: {len(stored)} of {len(units)} units are there")


def _read(source: InputSource, model: Any, reader: Any) -> Texts | Images:
    """The texts and their targets, or the images."""
    from fenchel.lens.heads.datasets import check_decoder, make_dataset
    from fenchel.lens.input_files import draw_places, read_images, read_targets, read_texts

    source.check(is_vision=hasattr(reader, "image_mean"))
    if source.texts is None:
        assert source.images is not None
        check_decoder(model, None)
        return make_dataset(reader, read_images(source.images, source.sample, source.seed))
    texts = read_texts(source.texts)
    places = draw_places(len(texts), source.sample, source.seed)
    targets = None
    if source.targets is not None:
        lines = read_targets(source.targets, len(texts))
        targets = [lines[place] for place in places]
    check_decoder(model, targets)
    chosen = [texts[place] for place in places]
    return make_dataset(reader, chosen, targets, longest=source.longest)
