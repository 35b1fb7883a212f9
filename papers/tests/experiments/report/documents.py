"""Runs as they are stored, made by hand."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

Document = dict[str, Any]
_SIZE = {"width": 64, "layers": 3, "heads": 4, "dropout": 0.0}


def document(
    study: str, data: str, attention: str, seed: int, accuracy: float, **more: Any
) -> Document:
    """more: variant, preset, note, facts, rate."""
    name = "test accuracy" if study == "vit" else "accuracy"
    training = {"seed": seed, "steps": 100, "batch": 8, "weight_decay": 0.05}
    return {
        "settings": {
            "study": study,
            "preset": more.get("preset", "cpu"),
            "data": data,
            "variant": more.get("variant", attention),
            "attention": attention,
            "size": _SIZE,
            "training": training | {"rate": more.get("rate", 3e-3)},
        },
        "note": more.get("note", ""),
        "scores": {name: accuracy},
        "facts": more.get("facts", {}),
        "cost": {"steps": 100, "seconds": 60.0, "flops": 2e12, "parameters": 1000, "threads": 1},
        "curve": [
            {"step": 50, name: accuracy / 2, "loss": 1.0},
            {"step": 100, name: accuracy, "loss": 0.5},
        ],
        "versions": {"fenchel": "1.2.3", "torch": "4.5.6"},
    }


def stored(folder: Path, *documents: Document) -> Path:
    for one in documents:
        settings = one["settings"]
        inside = folder / settings["study"] / settings["preset"] / settings["data"]
        inside.mkdir(parents=True, exist_ok=True)
        path = inside / f"{settings['variant']}-{settings['training']['seed']}.json"
        path.write_text(json.dumps(one), encoding="utf-8")
    return folder


def look(question: int, worth: float, peak: int = 0) -> dict[str, Any]:
    """A map of 16 x 16 with all weight on one cell."""
    levels = bytearray(256)
    levels[peak] = 255
    text = base64.b64encode(bytes(levels)).decode()
    return {"question": question, "answer": "yes", "worth": worth, "map": text}
