"""Small inputs that a model of transformers can be called with, made from its configuration.

Pixels and sound are noise: tokens that are all alike would not show who sees whom.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

_TOKENS = 8


def make_inputs(model: nn.Module, *, more: bool = False) -> dict[str, Any]:
    """Arguments of `forward` that the model is known to need: tokens, pixels or sound.

    more: whatever it takes of these, needed or not.
    """
    if not hasattr(model, "config"):
        raise ValueError("it has no configuration that says what it takes; pass inputs=")
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    config: Any = model.config
    device, dtype = _place(model)
    makers = {
        "input_ids": lambda: _ids(config, device),
        "decoder_input_ids": lambda: _ids(config, device),
        "pixel_values": lambda: _pixels(config).to(device, dtype),
        "input_features": lambda: _features(config).to(device, dtype),
        "input_values": lambda: torch.randn(1, 16_000).to(device, dtype),
        "bbox": lambda: torch.zeros(1, _TOKENS, 4, dtype=torch.long, device=device),
    }
    wanted = [main] if main in makers and (main in parameters or not more) else []
    for name, parameter in parameters.items():
        needed = (more or parameter.default is inspect.Parameter.empty) and name in makers
        decodes = name == "decoder_input_ids" and getattr(config, "is_encoder_decoder", False)
        if (needed or decodes or name == "bbox") and name not in wanted:
            wanted.append(name)
    return {name: makers[name]() for name in wanted}


def _place(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            hook = getattr(model, "_hf_hook", None)
            device = getattr(hook, "execution_device", None) or parameter.device
            return torch.device(device), parameter.dtype
    return torch.device("cpu"), torch.float32


def _number(config: Any, *names: str, default: Any) -> Any:
    """The first of these settings, in the configuration or one of its parts."""
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))]
    for part in parts:
        for name in names:
            if getattr(part, name, None) is not None:
                return getattr(part, name)
    return default


def _ids(config: Any, device: torch.device) -> Tensor:
    """Tokens that are neither padding nor the end."""
    words = int(_number(config, "vocab_size", default=16))
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "eos", "bos")}
    ordinary = [word for word in range(min(words, 64)) if word not in special] or [0]
    ids = [ordinary[place % len(ordinary)] for place in range(_TOKENS)]
    return torch.tensor([ids], device=device)


def _pixels(config: Any) -> Tensor:
    size = _number(config, "image_size", default=224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = _number(config, "num_channels", "in_channels", default=3)
    frames = _number(config, "num_frames", default=None)
    shape = (channels, height, width) if frames is None else (frames, channels, height, width)
    return torch.randn(1, *shape)


def _features(config: Any) -> Tensor:
    """A spectrogram (1, bin, frame)."""
    bins = _number(config, "num_mel_bins", "input_feat_per_channel", default=80)
    frames = 2 * int(_number(config, "max_source_positions", default=_TOKENS))
    return torch.randn(1, int(bins), frames)
