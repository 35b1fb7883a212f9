"""Models of transformers for `python -m benchmarks serve`: one from a folder, one at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import extras
from benchmarks.serve_attention import Operands

ROOM = 64  # tokens after a context, for the steps that are timed
_LETTERS = 16  # of the text for each token that is needed, which is more than enough


class Pretrained(NamedTuple):
    """A decoder and a text for it. ids: (1, token)."""

    name: str
    model: Any
    ids: Tensor

    @property
    def room(self) -> int:
        """Tokens that text and positions allow."""
        return min(self.ids.shape[1], int(self.model.config.max_position_embeddings))


@dataclass(frozen=True)
class Sizes:
    """Of a random Llama; as they stand, 1.04 billion parameters."""

    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 16
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    vocab_size: int = 32000


def library() -> Any:
    """transformers, where fenchel's names are known."""
    transformers = extras.load("transformers")
    extras.load("fenchel.hf")
    return transformers


def load(folder: Path, text: str, tokens: int, dtype: torch.dtype) -> Pretrained:
    """tokens: of the text, at most."""
    transformers = library()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=dtype, attn_implementation="sdpa"
    )
    shown = text[: tokens * _LETTERS]
    ids = tokenizer(shown, return_tensors="pt", truncation=True, max_length=tokens)["input_ids"]
    return Pretrained(folder.name, model.eval(), ids)


def random_llama(sizes: Sizes, positions: int, dtype: torch.dtype) -> Any:
    """Weights of transformers' own initialisation, whose deviation is `initializer_range`."""
    transformers = library()
    config = transformers.LlamaConfig(
        **asdict(sizes), max_position_embeddings=positions, tie_word_embeddings=True
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()


def parameters(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters())


@contextmanager
def replaced(name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """transformers' attention function of that name, wrapped while this lasts."""
    functions = extras.load("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    functions[name] = wrap(functions[name])  # on top of what is registered
    try:
        yield
    finally:
        del functions[name]


def record(pretrained: Pretrained, layers: int, tokens: int) -> dict[int, Operands]:
    """Queries, keys and values of so many layers, evenly spread, on the first tokens."""
    model, count = pretrained.model, int(pretrained.model.config.num_hidden_layers)
    wanted = {count * (2 * i + 1) // (2 * layers) for i in range(layers)}
    seen: dict[int, Operands] = {}

    def watch(attend: Any) -> Any:
        def attend_and_note(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any,
                            **options: Any) -> Any:  # fmt: skip
            if module.layer_idx in wanted:
                operands = Operands(query[0].transpose(0, 1), key, value)
                seen[module.layer_idx] = Operands(*(x.detach().clone() for x in operands))
            return attend(module, query, key, value, *args, **options)

        return attend_and_note

    model.set_attn_implementation("sdpa")
    with torch.no_grad(), replaced("sdpa", watch):
        model(pretrained.ids[:, :tokens], use_cache=False, logits_to_keep=1)
    return dict(sorted(seen.items()))
