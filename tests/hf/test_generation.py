"""`generate` in its ways: with softmax the tokens of sdpa, and with a cache those without."""

import pytest
import torch

from tests.hf.training import PAD, batch, llama

LENGTH = 8
IDS = batch()[:2]
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


def model(name, **more):
    return llama(name, eos_token_id=2, **more).eval()


def left_padded():
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, :3], mask[0, :3] = PAD, 0
    return ids, mask


def generate(name, ids, mask=None, **options):
    torch.manual_seed(1)
    settings = {"do_sample": False, "max_new_tokens": LENGTH, "pad_token_id": PAD, **options}
    mask = torch.ones_like(ids) if mask is None else mask
    return model(name).generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_softmax_generates_what_sdpa_does(way, padded):
    given = left_padded() if padded else (IDS,)
    dense, same, sparse = (
        generate(name, *given, **WAYS[way])
        for name in ("sdpa", "fenchel:softmax", "fenchel:entmax15")
    )
    assert torch.equal(same, dense)
    assert not torch.equal(sparse, dense)


@pytest.mark.parametrize("way", ["greedy", "static cache"])
def test_a_cache_and_padding_change_nothing(way):
    """Also for a sparse map: the tokens of the row alone, computed anew for every token."""
    ids, mask = left_padded()
    together = generate("fenchel:entmax15", ids, mask, min_new_tokens=LENGTH, **WAYS[way])
    options = {"use_cache": False, "min_new_tokens": LENGTH}
    first = generate("fenchel:entmax15", ids[:1, 3:], **options)
    second = generate("fenchel:entmax15", ids[1:], **options)
    assert torch.equal(together, torch.cat((first, second)))


@pytest.mark.parametrize("helper", ["a model", "the prompt"])
def test_assisted_decoding(helper):
    """Guesses are checked several at a time, against the cache; greedy tokens are the same."""
    for name in ("sdpa", "fenchel:softmax", "fenchel:entmax15"):
        if helper == "a model":
            assistant = model(name)
            torch.nn.init.normal_(assistant.model.layers[1].mlp.down_proj.weight, 0, 0.3)
            options = {"assistant_model": assistant}
        else:
            options = {"prompt_lookup_num_tokens": 2}
        ids = IDS[:1]
        assert torch.equal(generate(name, ids, **options), generate(name, ids)), name
    dense, same = (generate(name, IDS[:1]) for name in ("sdpa", "fenchel:softmax"))
    assert torch.equal(same, dense)
