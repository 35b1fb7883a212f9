"""The vision transformer of the paper and its variants."""

from dataclasses import replace

import pytest
import torch

from papers.experiments.data.digest import of_images
from papers.experiments.data.images import load_images
from papers.experiments.data.toy import load_toy
from papers.experiments.vit.model import ATTENTIONS, Size, VisionTransformer
from papers.experiments.vit.presets import job, jobs
from papers.experiments.vit.study import VitStudy
from papers.tests.experiments.files import write_fashion

SMALL = Size(width=16, inner=24, layers=2, heads=2, dropout=0.0)


def build_vit(attention, size=SMALL, side=8):
    torch.manual_seed(0)
    return VisionTransformer(size, attention, side=side, channels=1, classes=4).double().eval()


def images(count=4, side=8):
    return torch.randn(count, 1, side, side, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_papers_size_has_3_2_million_parameters(attention):
    """Six layers of width 256 with 512 inside: the paper's "hidden dimension 512" is the latter."""
    size = Size(width=256, inner=512, layers=6, heads=8)
    model = VisionTransformer(size, attention, side=32, channels=3, classes=100)
    assert sum(x.numel() for x in model.parameters()) == 3_218_276


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_answer_and_a_gradient_for_every_parameter(attention):
    model = build_vit(attention)
    model(images()).square().sum().backward()
    silent = [name for name, x in model.named_parameters() if x.grad is None]
    assert silent == []


def test_the_scale_of_transport_is_the_papers_or_vits():
    """softmax(<q, k> / scale) in a head: ViT's scale is the root of the head's width."""
    gammas = {name: build_vit(name).last.attention.transport.gamma for name in ATTENTIONS[3:5]}
    assert gammas == {"transport": SMALL.width**0.5, "transport-head": _vit_scale()}
    assert gammas["transport"] != gammas["transport-head"]


def _vit_scale():
    """Of the heads as they are: how much the scores of two tokens are divided by."""
    heads = build_vit("softmax").last.attention.heads
    with torch.no_grad():
        heads.in_proj_weight.zero_()
        heads.in_proj_weight[: 2 * SMALL.width] = torch.eye(SMALL.width).repeat(2, 1)
        heads.in_proj_bias.zero_()
    tokens = torch.zeros(1, 2, SMALL.width, dtype=torch.float64)
    tokens[0, 0, 0], tokens[0, 1, 0] = 1.0, 3.0  # scores 1 and 3 of the first, in the first head
    _, weights = heads(tokens, tokens, tokens, average_attn_weights=False)
    low, high = weights.detach()[0, 0, 0].log().tolist()
    return pytest.approx(2 / (high - low), rel=1e-12)


def test_reading_by_the_class_token_alone_is_the_whole_layer():
    """The last layer leaves out what nobody reads; a whole layer gives the class token the same."""
    model = build_vit("softmax")
    tokens = model.tokens(images())
    wanted = model.answer(model.norm(model.last(tokens)[:, 0]))
    torch.testing.assert_close(model(images()), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", ["softmax", "transport", "transport-head"])
def test_a_partners_tokens_are_seen_and_trained(attention):
    model = build_vit(attention)
    x = images().requires_grad_()
    alone = model(x)
    partner = torch.tensor([1, 0, 3, 2])
    together = model(x, partner)
    assert (together - alone).abs().max() > 1e-4
    (slope,) = torch.autograd.grad(together[0].sum(), x)
    assert slope[1].abs().max() > 0  # through the partner's templates
    assert slope[2].abs().max() == 0


def test_two_images_have_no_common_plane():
    with pytest.raises(ValueError, match="sharing = 0"):
        build_vit("continuous")(images(), torch.tensor([1, 0, 3, 2]))


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="attention must be of"):
        build_vit("hardmax")
    with pytest.raises(ValueError, match="do not tile"):
        build_vit("softmax", side=10)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = write_fashion(tmp_path_factory.mktemp("data") / "fashion-mnist", train=101)
    return VitStudy(load_images("fashion-mnist", folder), SMALL, "softmax", sharing=0.5)


def test_neighbours_in_a_batch_are_of_one_class(study):
    batches = study.order(0, 8, 0)
    flat = [place for batch in batches for place in batch]
    assert len(set(flat)) == len(flat)
    assert len(flat) >= 101 - 4 - 8  # but for an odd one of each class and the rest of a batch
    labels = study.train.labels
    for batch in batches:
        for left, right in zip(batch[::2], batch[1::2], strict=True):
            assert labels[left] == labels[right]
    assert study.order(0, 8, 0) == batches
    assert study.order(1, 8, 0) != batches
    assert study.order(0, 8, 1) != batches


def test_tokens_are_shared_in_half_of_the_steps(study):
    g = torch.Generator()
    shared = [bool(study.gathered([0, 1], g.manual_seed(step))["shared"]) for step in range(2_000)]
    assert 0.45 < sum(shared) / 2_000 < 0.55
    assert not VitStudy(study.data, SMALL, "softmax").gathered([0], g)["shared"]


def test_images_have_mean_zero_and_deviation_one(study):
    alone = VitStudy(study.data, SMALL, "softmax")
    x = alone.gathered(range(101), torch.Generator())["images"]
    assert abs(float(x.mean())) < 1e-5
    assert float(x.std()) == pytest.approx(1, abs=1e-3)


def test_accuracy_is_counted(study):
    class Right(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.zeros(()))

        def forward(self, images):
            """The brightest quarter."""
            quarters = images.unfold(2, 4, 4).unfold(3, 4, 4).mean((1, 4, 5)).flatten(1)
            return torch.nn.functional.pad(quarters, (0, 6), value=-9.0)

    assert study.scores(Right()) == {"test accuracy": 1.0}


def test_batches_must_hold_pairs(study):
    with pytest.raises(ValueError, match="must be even"):
        study.order(0, 7, 0)
    with pytest.raises(ValueError, match="fill no batch"):
        study.order(0, 500, 0)


def test_an_odd_share_of_a_batch_has_no_pairs(study):
    with pytest.raises(ValueError, match=r"by pairs, but 3 come to a process: .*multiple of twice"):
        study.gathered([0, 1, 2], torch.Generator())


@pytest.mark.parametrize("name", ["width", "inner", "layers", "heads", "patch"])
def test_sizes_are_whole_and_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        replace(SMALL, **{name: 0})
    with pytest.raises(TypeError, match=f"{name} must be a whole number, got 2.5"):
        replace(SMALL, **{name: 2.5})


def test_shares_and_counts_that_cannot_be_are_refused(study):
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="dropout must lie in"):
            replace(SMALL, dropout=share)
    with pytest.raises(ValueError, match="held must be >= 0, got -5"):
        VitStudy(study.data, SMALL, "softmax", held=-5)


# ---- which data


def test_other_images_or_labels_are_other_settings():
    data = load_toy(train=32, test=8)
    known = of_images(data)
    assert len(known) == 16
    assert of_images(load_toy(train=32, test=8)) == known
    for part in ("train", "test"):
        split = getattr(data, part)
        for name in ("images", "labels"):
            changed = getattr(split, name).clone()
            changed.view(-1)[-1] ^= 1
            other = replace(data, **{part: replace(split, **{name: changed})})
            assert of_images(other) != known
    flat = replace(data.train, images=data.train.images.reshape(32, 1, 8, 32))
    assert of_images(replace(data, train=flat)) != known  # the same bytes


def test_settings_hold_the_digest_of_the_data():
    data = load_toy(train=64, test=8)
    settings = job("smoke", data, "softmax", 0, 1e-2).settings()
    assert settings["data_digest"] == of_images(data)
    (first, *_) = jobs("smoke", data, ["softmax"], 1)
    assert first.settings() == settings
