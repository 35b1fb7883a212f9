"""Models from disk, with errors that say the way out.

Nothing that lies in a model's folder is executed: weights come from safetensors, and code of the
folder only where the caller trusts it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

DTYPES = ("float32", "float64", "bfloat16", "float16")
_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "tokenizer.tiktoken")
_INDEX = "*.safetensors.index.json"
_TOLD = (OSError, ValueError, RuntimeError)  # by transformers, in words that can stand alone
_SHOWN = 200  # characters of what else it raises
_UNUSED = ("pooler",)  # no number of an audit depends on these weights


def load(
    name: str | Path, dtype: str = "float32", trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """(model, tokenizer), for a vision model (model, image processor).

    name: a folder, or a name on the Hugging Face hub. The head that writes text is kept, other
    heads are left out: attention does not depend on them. trust_remote_code: run the model's own
    Python code where it has some.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be of {', '.join(DTYPES)}; got {dtype!r}")
    transformers = import_transformers()
    check_folder(name)
    # absolute: `.` has a name too, and a folder is never taken for a name on the hub
    source = os.path.abspath(name) if Path(name).is_dir() else str(name)
    if Path(source).is_dir():
        _check_weights(Path(source))
    with _explain_failures(source), silence(transformers.utils.logging):
        raw, _ = transformers.PreTrainedConfig.get_config_dict(source)
        runs_code = _runs_code(transformers, source, raw, trust_remote_code)
        kind = _model_class(transformers, raw, runs_code)
        model, info = kind.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    _check_complete(source, info)
    with silence(transformers.utils.logging):
        return model.eval(), _load_reader(transformers, source, model, trust_remote_code)


def check_folder(name: str | Path) -> None:
    """What cannot be a name on the hub, which is `owner/model` or `model`, must be a folder."""
    parts, path = str(name).split("/"), Path(name)
    if path.is_file():
        raise NotADirectoryError(
            f"cannot load {str(name)!r}: it is a file; give the folder, which holds config.json too"
        )
    if (isinstance(name, Path) or len(parts) > 2 or parts[0] in ("", ".", "..", "~")) and (
        not path.is_dir()
    ):
        raise FileNotFoundError(f"cannot load {str(name)!r}: the folder does not exist")


def import_transformers() -> Any:
    from fenchel.hf import library  # says what to install where it is missing

    return vars(library)["transformers"]


@contextmanager
def silence(logs: Any) -> Iterator[None]:
    """No report of heads that are left out, no retries, no bar beside ours."""
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    hub.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logs.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            logs.enable_progress_bar()


def _check_weights(folder: Path) -> None:
    """A configuration, and weights that cannot hold code."""
    names = sorted(path.name for path in folder.iterdir())
    if "config.json" not in names:
        shown = ", ".join(names[:8]) or "nothing"
        raise OSError(
            f"{folder} holds no config.json (there is: {shown}); give the folder that "
            "save_pretrained wrote"
        )
    for path in folder.rglob(_INDEX):
        _check_index(path)
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        _refuse_pickle(str(folder), pickles[0])
    raise OSError(f"{folder} holds no weights: looked for *.safetensors")


def _check_index(path: Path) -> None:
    """It says which file holds each weight; transformers opens whatever it names."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        files = set(document["weight_map"].values())
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as problem:
        raise OSError(
            f"{path} is damaged ({problem!r}), expected a table weight_map of the file of each "
            "weight; download or save the model again"
        ) from problem
    for name in files:
        if not _lies_inside(name):
            raise OSError(
                f"{path} names the weights {name!r}, expected a *.safetensors within the folder; "
                "download or save the model again"
            )


def _lies_inside(name: object) -> bool:
    """Whether it is a path of weights that does not lead out of a folder."""
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def _refuse_pickle(name: str, file: str) -> NoReturn:
    raise OSError(
        f"{name} holds its weights as a pickle ({file}), which can run code when it is opened: "
        "refused. If you trust it, convert it once, in a place where nothing can be harmed:\n"
        f"  from transformers import AutoModel, AutoTokenizer\n"
        f'  for kind in (AutoModel, AutoTokenizer): kind.from_pretrained("{name}")'
        '.save_pretrained("converted")\n'
        "(for a language model AutoModelForCausalLM or AutoModelForSeq2SeqLM in place of AutoModel)"
    )


@contextmanager
def _explain_failures(source: str) -> Iterator[None]:
    """What transformers and safetensors raise, in one line with the way out."""
    from safetensors import SafetensorError

    local = Path(source).is_dir()
    try:
        yield
    except SafetensorError as problem:
        raise OSError(
            f"the weights of {source} are damaged ({problem}); download or save them again"
        ) from problem
    except (NeedsCode, ImportError):
        raise
    except Exception as problem:  # it takes files as they are, and stumbles over them anyhow
        first = str(problem).strip().partition("\n")[0].rstrip(".")
        if not isinstance(problem, _TOLD):
            whole = " ".join(str(problem).split())[:_SHOWN]
            first = f"its files are not as expected ({type(problem).__name__}: {whole})"
        if "use_safetensors=True" in first:
            _refuse_pickle(source, "no *.safetensors")
        if local:
            raise OSError(f"cannot load {source}: {first}") from problem
        raise OSError(
            f"cannot load {source!r}: {first}. There is no such folder here; give one, or get it "
            f"where there is a network, with: hf download {source} --local-dir DIR"
        ) from problem


class NeedsCode(ValueError):
    """The model is written in Python code of its own folder."""


def _runs_code(transformers: Any, source: str, raw: dict[str, Any], trusted: bool) -> bool:
    """Whether the code of the model's folder runs."""
    is_in_transformers = raw.get("model_type") in transformers.CONFIG_MAPPING
    if "auto_map" not in raw or (is_in_transformers and not trusted):
        return False
    if not trusted:
        raise NeedsCode(
            f"cannot load {source}: transformers does not know {raw.get('model_type')!r}, and the "
            "code that the model brings is not run; read it, then give --trust-remote-code "
            "(trust_remote_code=True)"
        )
    return True


def _model_class(transformers: Any, raw: dict[str, Any], runs_code: bool) -> Any:
    """The class that the configuration names if it writes text or has no head, else AutoModel."""
    weights = str(raw.get("transformers_weights") or "")
    if weights.endswith(_PICKLES):
        raise ValueError(f"its weights are a pickle ({weights}): refused")
    if runs_code:
        names = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
        return getattr(transformers, next((n for n in names if n in raw["auto_map"]), "AutoModel"))
    for name in raw.get("architectures") or ():
        kind: Any = getattr(transformers, str(name), None)
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if is_model and (name.endswith("Model") or kind.can_generate()):
            return kind
    return transformers.AutoModel


def _check_complete(source: str, info: dict[str, Sequence[str]]) -> None:
    """Weights that are not in the file would be random."""
    missing = sorted(n for n in info["missing_keys"] if not any(p in n for p in _UNUSED))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise OSError(
            f"the weights of {source} lack {missing[0]}{more}: they do not belong to its "
            "config.json; download or save both again"
        )


def _load_reader(transformers: Any, source: str, model: Any, trusted: bool) -> Any:
    """The tokenizer, or the image processor."""
    given = model.main_input_name
    if given == "pixel_values":
        return _load_image_processor(transformers, source, trusted)
    if given != "input_ids":
        raise ValueError(
            f"{type(model).__name__} reads {given}; looked for texts (input_ids) or images "
            "(pixel_values)"
        )
    tokenizer = _load_tokenizer(transformers, source, trusted)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer of {source} has neither pad_token nor eos_token; set pad_token in "
                "tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_tokenizer(transformers: Any, source: str, trusted: bool) -> Any:
    folder = Path(source)
    # without its files transformers makes an empty tokenizer, that knows no word
    if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZERS):
        raise OSError(
            f"{source} holds no tokenizer: looked for {', '.join(_TOKENIZERS)}; copy the files of "
            "the tokenizer that the model was trained with into it"
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trusted)
    except Exception as problem:  # the tokenizers library raises Exception itself
        first = str(problem).strip().partition("\n")[0]
        raise OSError(f"cannot load the tokenizer of {source}: {first}") from problem


def _load_image_processor(transformers: Any, source: str, trusted: bool) -> Any:
    try:
        return transformers.AutoImageProcessor.from_pretrained(source, trust_remote_code=trusted)
    except (OSError, ValueError, ImportError) as problem:
        first = str(problem).strip().partition("\n")[0]
        raise OSError(
            f"cannot load the image processor of {source}, which preprocessor_config.json "
            f"describes: {first}"
        ) from problem
