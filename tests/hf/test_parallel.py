"""Models that are spread over processes answer and train as in one."""

import pytest
import torch

import fenchel as fl
from tests import needs
from tests.hf.models import hf, logits, transformers
from tests.hf.training import (
    HEADS,
    STEPS,
    agree,
    alphas,
    batch,
    converted,
    falls,
    learned,
    llama,
    take_steps,
)

if not torch.distributed.is_available():
    needs.skip("a torch without torch.distributed", "models that are spread over processes")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import PROCESSES, alone, run_spread

DIGITS = 1e-4
PER_HEAD = torch.tensor([[1.1], [1.3], [1.5], [2.0]])


def shared(layer):
    """One alpha for all heads of a layer. Each process sees a part of its gradient."""
    return fl.Tsallis(torch.nn.Parameter(torch.tensor(1.4)))


def mixed(layer):
    return fl.Tsallis(PER_HEAD)


def sharded(model, **policy):
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    return fully_shard(model, **policy)


def train_share(rank, model):
    """Losses of all processes, each of which sees its texts."""
    losses = torch.tensor(take_steps(model, batch().chunk(PROCESSES)[rank]))
    torch.distributed.all_reduce(losses)
    return (losses / PROCESSES).tolist()


def by_data(rank):
    low = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    wrapped = {
        "sdpa": sharded(llama()),
        "softmax": sharded(llama("fenchel:softmax")),
        "sparse": sharded(llama("fenchel:entmax15")),
        "sparse, late": hf.convert(sharded(llama()), "fenchel:entmax15"),
        "learned": sharded(converted(learned)),
        "learned, DDP": DistributedDataParallel(converted(learned)),
        "sdpa, bfloat16": sharded(llama(), **low),
        "softmax, bfloat16": sharded(llama("fenchel:softmax"), **low),
        "learned, bfloat16": sharded(converted(learned), **low),
    }
    return {kind: train_share(rank, model) for kind, model in wrapped.items()}


@pytest.mark.slow
def test_data_parallel():
    """Each process has its texts, and `fully_shard` spreads the weights."""
    losses, others = run_spread(by_data)
    assert losses == others
    dense, sparse, own = (
        take_steps(converted(choice), batch()) for choice in ("sdpa", "fenchel:entmax15", learned)
    )
    assert agree(losses["sdpa"], dense, DIGITS)
    assert agree(losses["softmax"], dense, DIGITS)
    assert agree(losses["sparse"], sparse, DIGITS)
    assert agree(losses["sparse, late"], sparse, DIGITS)
    assert agree(losses["learned"], own, DIGITS)
    assert agree(losses["learned, DDP"], own, DIGITS)
    assert agree(losses["softmax, bfloat16"], losses["sdpa, bfloat16"], 0.02)
    assert falls(losses["learned, bfloat16"])
    assert not agree(losses["learned"], dense, DIGITS)


CHOICES = {
    "sdpa": "sdpa",
    "softmax": "fenchel:softmax",
    "sparse": "fenchel:entmax15",
    "per head": mixed,
    "learned": learned,
    "shared": shared,
}


def split_heads(model):
    """By torch's own means."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    parts = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {**parts, "self_attn.o_proj": RowwiseParallel()})
    return model


def by_heads(rank, folder):
    plan = transformers.distributed.DistributedConfig(tp_plan="auto")
    load = transformers.LlamaForCausalLM.from_pretrained
    answers = {}
    for kind, choice in CHOICES.items():
        answers[f"{kind}, torch"] = _trained(split_heads(converted(choice)))
        model = load(f"{folder}/plain", distributed_config=plan)
        if kind != "sdpa":
            hf.convert(model, choice)
        answers[kind] = _trained(model)
    held = load(f"{folder}/held", distributed_config=plan, attn_implementation="fenchel:held")
    answers["held"] = _trained(held)
    held.save_pretrained(f"{folder}/trained")
    weights = held(batch(), output_attentions=True).attentions
    return answers, tuple(weights[0].shape)


def _trained(model):
    """Losses, and the alphas after them."""
    # Plain steps: Adam's first ones have the size of its rate, however wrong a gradient is.
    losses = take_steps(model, batch(), torch.optim.SGD(model.parameters(), lr=0.1))
    return losses, [alpha.detach() for alpha in alphas(model)]


@pytest.mark.slow
def test_tensor_parallel(tmp_path):
    """Each process computes half of the heads; a regulariser is whole, and the same, in each."""
    llama().save_pretrained(tmp_path / "plain")
    held = converted(learned)
    with torch.no_grad():
        for raw in alphas(held):
            raw += torch.arange(HEADS)[:, None] * 0.4 - 0.6
    held.save_pretrained(tmp_path / "held")
    (here, shape), (there, _) = run_spread(by_heads, str(tmp_path))
    assert shape == (4, HEADS // PROCESSES, 9, 9)
    expected = {kind: _trained(converted(choice)) for kind, choice in CHOICES.items()}
    expected |= {f"{kind}, torch": answer for kind, answer in expected.items()}
    expected["held"] = _trained(held)
    assert expected.keys() == here.keys() == there.keys()
    for kind, (losses, numbers) in expected.items():
        for answer in (here[kind], there[kind]):
            assert agree(answer[0], losses, DIGITS), kind
            torch.testing.assert_close(answer[1], numbers, rtol=1e-3, atol=1e-5)
    assert not agree(here["held"][0], here["sparse"][0], DIGITS)
    load = transformers.LlamaForCausalLM.from_pretrained
    again = load(tmp_path / "trained", attn_implementation="fenchel:held")
    torch.testing.assert_close(
        logits(again, input_ids=batch()), logits(held, input_ids=batch()), rtol=0, atol=0.01
    )


def test_each_process_takes_the_alphas_of_its_heads():
    """As the second of two processes, of which the first does not exist."""
    module = "torch.testing._internal.distributed.fake_pg"
    fake = needs.package(module, "the heads of one process among several, without the others")
    q, k, v = torch.randn(3, 1, HEADS // 2, 5, 8, generator=torch.Generator().manual_seed(0))
    init = torch.distributed.init_process_group
    init("fake", rank=1, world_size=PROCESSES, store=fake.FakeStore())
    try:
        attention = split_heads(converted(mixed)).model.layers[0].self_attn
        attend = transformers.AttentionInterface()["fenchel:held"]
        output, _ = attend(attention, q, k, v, None)
    finally:
        torch.distributed.destroy_process_group()
    expected = fl.attention(q, k, v, fl.Tsallis(PER_HEAD[2:]), is_causal=True)
    assert torch.equal(output, expected.transpose(1, 2))
    other = fl.attention(q, k, v, fl.Tsallis(PER_HEAD[:2]), is_causal=True)
    assert not torch.equal(output, other.transpose(1, 2))


def too_few(rank):
    """One number for each head here, instead of each head."""
    model = split_heads(hf.convert(llama(), lambda layer: fl.nn.LearnedTsallis(HEADS)))
    for layer in model.model.layers:
        layer.self_attn.fenchel_regularizer = fl.nn.LearnedTsallis(HEADS // PROCESSES)
    with pytest.raises(ValueError, match="of all heads, 4"):
        model(batch())
    return True


@pytest.mark.slow
def test_alphas_of_the_heads_here_alone_are_refused():
    """They would be saved as those of the first process."""
    assert all(run_spread(too_few))


def flattened(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:.*NO_SHARD:UserWarning", "ignore:FSDP:UserWarning")
@pytest.mark.parametrize("wrap", [sharded, flattened, DistributedDataParallel])
def test_what_trains_comes_before_a_wrapper(wrap, tmp_path):
    """Wrappers average the gradients of the parameters that they know."""
    with alone(tmp_path):
        with pytest.raises(ValueError, match="convert the model before"):
            hf.convert(wrap(llama()), learned)
        late = hf.convert(wrap(llama()), "fenchel:entmax15")
        early = wrap(converted(learned))
        assert agree(
            take_steps(late, batch()), take_steps(llama("fenchel:entmax15"), batch()), DIGITS
        )
        assert len(take_steps(early, batch())) == STEPS
        assert hf.check(late)
