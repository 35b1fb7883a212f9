"""Short runs of the training loop: a small ViT on a few pictures, and a line through points."""

from papers.experiments.checkpoint import Checkpoints
from papers.experiments.data.images import load_images
from papers.experiments.loop import Training, train
from papers.experiments.vit.model import Size
from papers.experiments.vit.study import VitStudy
from papers.tests.experiments.files import write_fashion
from papers.tests.experiments.tiny import Line

TRAINING = Training(
    steps=12, batch=8, rate=3e-3, warmup=2, evaluate_every=4, save_every=3, weight_decay=0.01
)
SIZE = Size(width=16, inner=16, layers=2, heads=2)
LINE = Training(steps=12, batch=4, warmup=2, evaluate_every=4, save_every=3)
CONFIG = {"study": "vit"}


def vit_study(folder):
    """Attention by transport; its pictures are written into the folder."""
    data = load_images("fashion-mnist", write_fashion(folder / "fashion-mnist"))
    return VitStudy(data, SIZE, "transport", sharing=0.5)


def train_vit(study, folder, resume=False, training=TRAINING, say=lambda text: None, **settings):
    """The outcome, the metrics and the last weights."""
    outcome = train(study, training, folder, CONFIG, resume=resume, say=say, **settings)
    state, _ = Checkpoints(folder, {}).newest()
    return outcome, (folder / "metrics.jsonl").read_text(), state.tensors


def train_line(folder, study=None, training=LINE, resume=False, **settings):
    settings = {"say": lambda text: None} | settings
    return train(study or Line(), training, folder, CONFIG, resume=resume, **settings)


def stop_at(stop):
    def advance(step, numbers):
        if step == stop:
            raise KeyboardInterrupt

    return advance
