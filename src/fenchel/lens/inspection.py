"""inspect: from a model that runs to what one head decided, and how sure that is."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

from fenchel._attention.call import AttentionCall
from fenchel._attention.solution import AttentionSolution, solve_head
from fenchel._numerics import check_whole
from fenchel._solution import Status, explain_statuses
from fenchel.lens.capture.calls import configs_of
from fenchel.lens.capture.heads import watch_calls
from fenchel.regularizers import Regularizer

if TYPE_CHECKING:  # matplotlib loads when something is drawn
    from matplotlib.figure import Figure

_SHOWN = 8  # layers that a message names
_WAY_OUT = (
    "What can be seen is scaled_dot_product_attention, torch.nn.MultiheadAttention, "
    'fenchel.attention, and transformers on "sdpa", "eager" or "fenchel:…", in code that is not '
    "traced or exported. Otherwise give queries, keys and values to fenchel.attention_solution"
)


@dataclass(frozen=True, eq=False)
class Inspection:
    """What one head decided in one pass of a model. Names are those of `Solution`.

    layer: its number in the order of calls; path: of the module that made the call.
    output (query, d): what the model was given; the weights times `value` (key, d).
    """

    layer: int
    path: str
    head: int
    example: int
    regularizer: Regularizer
    solution: AttentionSolution  # of scores (query, key)
    value: Tensor
    output: Tensor

    @property
    def weights(self) -> Tensor:
        """A `torch.sparse_csr` matrix (query, key); `.to_dense()` has the zeros."""
        return self.solution.head()

    @property
    def support(self) -> Tensor:
        """Which keys carry weight. bool, (query, key)"""
        return self.solution.support

    @property
    def support_size(self) -> Tensor:
        """How many keys carry weight. (query,)"""
        return self.solution.support_size

    @property
    def visible_size(self) -> Tensor:
        """How many keys each query may attend to. (query,)"""
        return self.solution.visible_size

    @property
    def threshold(self) -> Tensor:
        """The score at or below which a key gets nothing; -inf for softmax. (query,)"""
        return self.solution.threshold

    @property
    def gap(self) -> Tensor:
        """Certified distance from the optimum. (query,)"""
        return self.solution.gap

    @property
    def status(self) -> Tensor:
        """Codes of `Status`. (query,)"""
        return self.solution.status

    @property
    def queries(self) -> int:
        return self.solution.shape[0]

    @property
    def keys(self) -> int:
        return self.solution.shape[1]

    def __repr__(self) -> str:
        about = repr(self.solution).partition("), ")[2]
        where = f"layer {self.layer} ({_place(self.path)}), head {self.head}"
        size = f"{self.queries} queries x {self.keys} keys"
        return f"Inspection({where}, {_name(self.regularizer)}, {size}, {about}"

    def explain(self) -> str:
        """What the head looks at, and whether that is certified, in a few sentences."""
        name = _name(self.regularizer)
        place = f"Head {self.head} of layer {self.layer} ({_place(self.path)})"
        lines = [f"{place} solves {name} for {self.queries} queries over {self.keys} keys."]
        if int(self.support_size.sum()):
            lines += [self._explain_support(), self._explain_favourite()]
        if (self.status == Status.OK.value).all():
            gap = float(self.gap.max()) if self.queries else 0.0
            lines.append(f"Every row is certified: no weights are better by more than {gap:.2g}.")
        else:
            lines.append(explain_statuses(self.status, {x: x.remedy for x in Status}))
        return "\n".join(lines)

    def _explain_support(self) -> str:
        sizes, visible = self.support_size.double(), self.visible_size.double()
        return (
            f"A query uses {sizes.mean():.3g} of the {visible.mean():.3g} keys that it may see, "
            f"on average; the fewest are {int(sizes.min())}, the most {int(sizes.max())}."
        )

    def _explain_favourite(self) -> str:
        entries = self.solution.entries.nan_to_num(0.0)
        by_key = entries.new_zeros(self.keys).index_add(0, self.solution.keys, entries)
        share = 100 * float(by_key.max() / by_key.sum())
        return f"Key {int(by_key.argmax())} gets the most: {share:.3g} % of all weight."

    def plot(self, tokens: Sequence[str] | None = None) -> Figure:
        """A matplotlib figure: queries down, keys across, empty where a weight is exactly zero.

        tokens: labels of the keys, and of the queries where there are as many.
        """
        if tokens is not None and len(tokens) != self.keys:
            raise ValueError(f"tokens must name the {self.keys} keys, got {len(tokens)} names")
        try:
            from fenchel.lens.pictures.head import head_figure
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f'plot needs {missing.name}: pip install "fenchel[report]"', name=missing.name
            ) from missing
        title = f"layer {self.layer}, head {self.head}\n{_name(self.regularizer)}"
        queries = tokens if self.queries == self.keys else None
        return head_figure(self.weights.to_dense(), title, queries, tokens)


def inspect(
    model: Module, inputs: Any, layer: int | str, head: int, *, example: int = 0
) -> Inspection:
    """What one head of a model decides for these inputs, with its certificate.

    >>> seen = fl.inspect(model, tokenizer("a cat sat", return_tensors="pt"), layer=3, head=5)
    >>> print(seen.explain())
    >>> seen.weights.to_dense(), seen.support_size, seen.gap, seen.plot()

    The model runs once, in evaluation mode and without gradients, and stays as it is.

    model: any module whose attention is `scaled_dot_product_attention`,
        `torch.nn.MultiheadAttention`, `fl.attention` or a layer of `fenchel.nn`; or a Hugging Face
        model, converted or not.
    inputs: what the model takes: a tensor, a tuple (`model(*inputs)`), or a mapping such as a
        tokenizer returns (`model(**inputs)`).
    layer: number of the attention call, in the order of calls, from 0; or the path of a module in
        which there is one attention, such as "model.layers.3".
    example: which one of a batch.
    """
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(layer, str):
        check_whole(layer, "layer", 0)
    for name, number in (("head", head), ("example", example)):
        check_whole(number, name, 0)
    search = _Search(layer, head, example)
    with watch_calls(model, search.note) as watch:
        _run(model, inputs)
    return search.result(model, list(watch.softmax_paths))


@dataclass
class _Search:
    """The call that is asked for, among all that are made."""

    layer: int | str
    head: int
    example: int
    paths: list[str] = field(default_factory=list)  # of all calls
    matches: list[int] = field(default_factory=list)  # their numbers
    sizes: tuple[int, int] = (0, 0)  # examples and heads of the first match
    found: Inspection | None = None

    def note(
        self, path: str, call: AttentionCall, regularizer: Regularizer, output: Tensor
    ) -> None:
        """Solved at once: later the model may write over its tensors."""
        number = len(self.paths)
        self.paths.append(path)
        if not self._asks_for(number, path):
            return
        self.matches.append(number)
        if len(self.matches) > 1:
            return
        examples, heads = self.sizes = call.query.shape[0], call.query.shape[1]
        if self.example < examples and self.head < heads:
            solution, omega = solve_head(call, regularizer, self.example, self.head)
            value = call.value[self.example, self.head * call.value.shape[1] // heads]
            place = (number, path, self.head, self.example)
            given = output[self.example, self.head]
            self.found = Inspection(*place, omega, solution, value.clone(), given.clone())

    def _asks_for(self, number: int, path: str) -> bool:
        if isinstance(self.layer, str):
            return self.layer in ("", path) or path.startswith(f"{self.layer}.")
        return number == self.layer

    def result(self, model: Module, softmax_paths: list[str]) -> Inspection:
        """Or an error that says what there is."""
        if not self.matches:
            raise self._no_layer(model, softmax_paths)
        if len(self.matches) > 1:
            raise ValueError(
                f"{self.layer or 'the model'} attends {len(self.matches)} times in a pass; give "
                f"one of these numbers as layer: {self._layers(self.matches)}"
            )
        if self.found is None:
            asked = (("head", self.head, self.sizes[1]), ("example", self.example, self.sizes[0]))
            name, number, count = next(x for x in asked if x[1] >= x[2])
            raise IndexError(
                f"{name} must be from 0 to {count - 1} in layer {self._layers(self.matches)}, "
                f"got {number}"
            )
        return self.found

    def _no_layer(self, model: Module, softmax_paths: list[str]) -> Exception:
        kind, path = type(model).__name__, self.layer
        if isinstance(path, str) and path not in dict(model.named_modules()):
            return ValueError(
                f"{kind} has no module {path!r}; its attention layers are {self._layers()}"
            )
        if isinstance(path, int) and self.paths:
            return IndexError(
                f"layer must be from 0 to {len(self.paths) - 1} in {kind}, got {path}; its "
                f"attention layers are {self._layers()}"
            )
        inside = path if isinstance(path, str) else ""
        by_hand = [x for x in softmax_paths if x.startswith(inside)]
        why = f" It computes a softmax of its own, in {_some(by_hand)}." if by_hand else ""
        return ValueError(f"no attention can be seen in {inside or kind}.{why} {_WAY_OUT}")

    def _layers(self, numbers: Sequence[int] | None = None) -> str:
        chosen = range(len(self.paths)) if numbers is None else numbers
        return _some([f"{number} ({_place(self.paths[number])})" for number in chosen])


def _place(path: str) -> str:
    return path or "the model itself"


def _some(names: Sequence[str]) -> str:
    shown = [_place(name) for name in names]
    if len(shown) > _SHOWN:
        shown = [*shown[: _SHOWN - 1], f"… {shown[-1]}"]
    return ", ".join(shown) or "none"


def _name(regularizer: Regularizer) -> str:
    """With a number where a tensor holds one."""
    plain = copy.copy(regularizer)
    for name, value in vars(regularizer).items():
        if isinstance(value, Tensor) and value.numel() == 1:
            object.__setattr__(plain, name, round(float(value), 4))
    return repr(plain)


def _run(model: Module, inputs: Any) -> None:
    """Weights are not returned beside: a model of transformers would leave its fast attention."""
    asked = any(getattr(config, "output_attentions", False) for config in configs_of(model))
    without = {"output_attentions": False} if asked else {}
    if isinstance(inputs, Mapping):
        given = dict(inputs)
        given.update({"output_attentions": False} if given.get("output_attentions") else without)
        model(**given)
    elif isinstance(inputs, tuple | list):
        model(*inputs, **without)
    else:
        model(inputs, **without)
