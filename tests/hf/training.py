"""A small decoder, a few texts, and losses of five steps, for every test that trains."""

import torch

import fenchel as fl
from tests.hf.models import hf, transformers

HEADS, PAD, STEPS = 4, 1, 5
LENGTHS = (5, 9, 12, 7, 8, 11, 6, 10)


def llama(name="sdpa", **more):
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        attn_implementation=name,
        initializer_range=0.3,
        pad_token_id=PAD,
        **more,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def learned(layer):
    return fl.nn.LearnedTsallis(HEADS, init=1.4)


def converted(choice):
    """By a name, or by what `convert` takes besides."""
    return llama(choice) if isinstance(choice, str) else hf.convert(llama(), choice)


def alphas(model):
    return [p for name, p in model.named_parameters() if "fenchel_regularizer" in name]


def texts():
    """As rows of a data set."""
    generator = torch.Generator().manual_seed(1)
    ids = (torch.randint(3, 40, (length,), generator=generator) for length in LENGTHS)
    return [{"input_ids": row.tolist()} for row in ids]


def batch():
    """(4, 9), without padding."""
    return torch.randint(3, 40, (4, 9), generator=torch.Generator().manual_seed(1))


def take_steps(model, ids, optimizer=None, backward=torch.Tensor.backward):
    """The loss before each of the steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def agree(losses, others, digits):
    """Step by step, relative to their size."""
    return len(losses) == len(others) == STEPS and all(
        abs(loss - other) <= digits * other for loss, other in zip(losses, others, strict=True)
    )


def falls(losses):
    return len(losses) == STEPS and losses[-1] < 0.9 * losses[0]  # false for NaN
