"""What is known of a model and of what it was shown, besides the numbers of its heads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fenchel.lens.document import InputFacts, ModelFacts, SettingsFacts
from fenchel.lens.families import Kind, place_name
from fenchel.lens.heads.datasets import Dataset, Images, Texts, grid
from fenchel.lens.heads.settings import AuditSettings, ExecutionSettings
from fenchel.lens.tokenizing import token_limit


@dataclass(frozen=True)
class AuditFacts:
    """execution: None where an audit did not come from the command."""

    model: ModelFacts
    inputs: InputFacts
    settings: AuditSettings
    execution: ExecutionSettings | None = None

    def all_settings(self) -> SettingsFacts:
        """Those of the audit, and those of the command."""
        facts = SettingsFacts(**asdict(self.settings))
        command = self.execution
        if command is None:
            return facts
        return replace(facts, dtype=command.dtype, threads=command.threads, longest=command.longest)


def describe_model(
    model: Any, paths: dict[tuple[Kind, int], str], sizes: dict[tuple[Kind, int], int]
) -> ModelFacts:
    """paths, sizes: the module of each attention, and how many heads it has."""
    name = str(getattr(model, "name_or_path", "") or "").rstrip("/").rpartition("/")[2]
    return ModelFacts(
        name=name or type(model).__name__,
        type=str(getattr(model.config, "model_type", "")),
        class_name=type(model).__name__,
        parameters=sum(x.numel() for x in model.parameters()),
        paths={place_name(*place): path for place, path in paths.items()},
        heads={place_name(*place): count for place, count in sizes.items()},
    )


def complete_inputs(inputs: InputFacts, model: Any, dataset: Dataset, counted: bool) -> InputFacts:
    """With the limit of a text, and with the counts where no measure saw all texts."""
    if isinstance(dataset, Texts):
        inputs = replace(inputs, longest=token_limit(model, dataset.tokenizer, dataset.longest))
    if counted:
        return inputs
    cut = dataset.cut(model, range(len(dataset)))
    return replace(inputs, truncated=cut, tokens=_count_tokens(inputs, model, dataset))


def _count_tokens(inputs: InputFacts, model: Any, dataset: Dataset) -> int | None:
    if isinstance(dataset, Texts):
        rows = dataset.tokenizer(list(dataset.texts), verbose=False)["input_ids"]
        longest = inputs.longest
        return sum(len(row) if longest is None else min(len(row), longest) for row in rows)
    if isinstance(dataset, Images):
        before, height, width = grid(model, dataset.pixels(model, [0]))
        return len(dataset) * (before + height * width)
    return None
