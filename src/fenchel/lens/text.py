"""Models and sentences from disk, ready for an audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fenchel._numerics import check_whole

_LONGEST = 512  # tokens


def load(name: str | Path) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder, or of a name on the Hugging Face hub; in float32.

    Without a network a name works only if it was downloaded before.
    """
    transformers = _transformers()
    _check_folder(name)
    try:
        with _quietly(transformers.utils.logging):
            model = transformers.AutoModel.from_pretrained(str(name), dtype=torch.float32)
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(name))
    except (OSError, ValueError) as problem:
        first = str(problem).strip().partition("\n")[0]
        raise OSError(
            f"cannot load {str(name)!r}: {first} Give a folder that from_pretrained loads, or, "
            "with a network, a name on the Hugging Face hub (HF_HUB_OFFLINE must not be set)"
        ) from problem
    return model.eval(), tokenizer


def _check_folder(name: str | Path) -> None:
    """What cannot be a name on the hub, which is `owner/model` or `model`, must be a folder."""
    parts, path = str(name).split("/"), Path(name)
    if (isinstance(name, Path) or len(parts) > 2 or parts[0] in ("", ".", "..", "~")) and (
        not path.is_dir()
    ):
        raise OSError(f"cannot load {str(name)!r}: the folder does not exist")


def _transformers() -> Any:
    from fenchel.hf import library  # says what to install where it is missing

    return vars(library)["transformers"]


@contextmanager
def _quietly(logging: Any) -> Iterator[None]:
    """No report of heads that are left out, no bar beside ours."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def sentences(path: Path, count: int) -> list[str]:
    """The first `count` lines that are not empty; of a .tsv the first column, as it stands."""
    check_whole(count, "count", 1)
    with path.open(encoding="utf-8") as lines:
        texts = (line.partition("\t")[0] if path.suffix == ".tsv" else line for line in lines)
        found = list(islice((text.strip() for text in texts if text.strip()), count))
    if not found:
        raise ValueError(f"{path} holds no sentence")
    return found


def encode(tokenizer: Any, texts: Sequence[str], *, decoder: bool = False) -> dict[str, Tensor]:
    """Padded, at most 512 tokens each.

    decoder: with labels, the same tokens: the decoder is given the sentence itself, moved on by
        one, as in copying it.
    """
    longest = min(_LONGEST, tokenizer.model_max_length)
    made = tokenizer(
        list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt"
    )
    inputs = dict(made)
    if decoder:
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        hidden = inputs["attention_mask"] == 0
        inputs["labels"] = inputs["input_ids"].masked_fill(hidden, -100)
    return inputs
