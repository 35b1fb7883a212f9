"""Converted models where people train them: mixed precision, packing, other processes, adapters."""

import multiprocessing
import pickle
import subprocess
import sys

import pytest
import torch

import fenchel as fl
from tests import needs
from tests.hf.models import hf, inputs, logits, tiny, tokens, transformers
from tests.hf.training import HEADS, alphas, learned, llama


@pytest.mark.parametrize("name", ["fenchel:softmax", "fenchel:entmax15"])
def test_bfloat16_autocast_of_a_rotary_model(name):
    """Its queries and keys are float32, its values bfloat16."""
    ids = tokens()
    losses = []
    for kind in ("sdpa", name):
        model = llama(kind)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if name == "fenchel:softmax":
        assert abs(losses[1] - losses[0]) <= 0.02 * losses[0]  # bfloat16 has 3 digits


def test_packed_sequences_are_apart():
    """By position_ids, by lengths as flash attention takes them, and one by one: the same."""
    one, two = tokens(length=5)[:1], tokens(length=7)[:1]
    packed = torch.cat((one, two), 1)
    places = torch.cat((torch.arange(5), torch.arange(7)))[None]
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    lengths = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 7,
        "max_length_k": 7,
    }
    for name in ("fenchel:softmax", "fenchel:entmax15"):
        model = llama(name).double().eval()
        alone = torch.cat((logits(model, input_ids=one), logits(model, input_ids=two)), 1)
        batch = {"input_ids": packed, "position_ids": places, "use_cache": False}
        by_place = logits(model, **batch)
        by_length = logits(model, **batch, **lengths)
        assert (by_place - alone).abs().max() <= 1e-12
        assert (by_length - alone).abs().max() <= 1e-12


def test_lengths_alone_keep_sequences_apart():
    """Where no mask says so: a model that makes none, as encoders do."""
    attend = transformers.AttentionInterface()["fenchel:entmax15"]
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    output, _ = attend(module, q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    for start, stop in ((0, 2), (2, 6)):
        part = (x[:, :, start:stop] for x in (q, k, v))
        alone = fl.attention(*part, fl.Tsallis(1.5), is_causal=True)
        assert torch.equal(output[:, start:stop], alone.transpose(1, 2))
    with pytest.raises(ValueError, match="must be the same"):
        attend(module, q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends[:2])


def test_lengths_keep_sequences_apart_beside_a_cache():
    """There transformers makes a causal mask that does not say so."""
    model, ids = hf.convert(tiny("llama"), "fenchel:entmax15"), tokens(1, 6)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    places = {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    apart = torch.cat([logits(model, input_ids=part) for part in ids.split([2, 4], 1)], 1)
    for cached in (True, False):
        packed = logits(model, input_ids=ids, use_cache=cached, **places, **lengths)
        torch.testing.assert_close(packed, apart)


def test_a_whole_number_mask_and_a_tensor_as_scale():
    attend = transformers.AttentionInterface()["fenchel:entmax15"]
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.long).tril()
    scale = torch.tensor(0.3, requires_grad=True)
    output, _ = attend(module, q, k, v, mask, scaling=scale)
    expected = fl.attention(q, k, v, fl.Tsallis(1.5), is_causal=True, scale=0.3)
    torch.testing.assert_close(output, expected.transpose(1, 2))
    output.sum().backward()
    assert scale.grad.abs() > 0


def run_in_another(blob, ids):
    """The import of fenchel.hf comes with the model."""
    with torch.no_grad():
        return pickle.loads(blob)(ids).logits


@pytest.mark.parametrize("choice", [learned, fl.Tsallis(1.7), "fenchel:entmax15"])
def test_another_process_gets_the_model_whole(choice, tmp_path):
    model, ids = hf.convert(llama().eval(), choice), tokens()
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    torch.save(ids, tmp_path / "ids.pt")
    code = (
        "import pickle, sys, torch; folder = sys.argv[1]; "
        "model = pickle.load(open(folder + '/model.pickle', 'rb')); "
        "ids = torch.load(folder + '/ids.pt'); "
        "torch.save(model(ids).logits.detach(), folder + '/logits.pt')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    there = torch.load(tmp_path / "logits.pt")
    assert (there - logits(model, input_ids=ids)).abs().max() <= 1e-5
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        again = pool.apply(run_in_another, (pickle.dumps(model), ids))
    assert (again - there).abs().max() <= 1e-5


LOADING = """
import sys, torch, fenchel.hf
from transformers import LlamaForCausalLM
folder = sys.argv[1]
model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="fenchel:held").eval()
torch.save(model(torch.load(folder + "/ids.pt")).logits.detach(), folder + "/logits.pt")
"""


@pytest.mark.parametrize("kind", ["learned", "recipe"])
def test_what_attentions_hold_is_saved_with_the_model(kind, tmp_path):
    model, ids = llama().eval(), tokens()
    if kind == "learned":
        hf.convert(model, learned)
        with torch.no_grad():
            for number, raw in enumerate(alphas(model)):
                raw += torch.arange(HEADS)[:, None] * 0.3 - number
    else:
        paths = [row.path for row in hf.check(model).rows]
        values = {path: [1.0, 1.2, 1.5, 1.9 + n / 20] for n, path in enumerate(paths)}
        hf.convert(model, {"format": "fenchel-recipe-1", "alphas": values})
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    subprocess.run([sys.executable, "-c", LOADING, str(tmp_path)], check=True)
    assert (torch.load(tmp_path / "logits.pt") - logits(model, input_ids=ids)).abs().max() <= 1e-5


def test_leading_back_leaves_nothing_behind():
    model = llama()
    plain = set(model.state_dict())
    hf.convert(model, learned)
    assert set(model.state_dict()) != plain
    model.set_attn_implementation("sdpa")
    assert set(model.state_dict()) == plain
    assert "fenchel_attention" not in model.config.to_dict()


def test_alphas_are_saved_with_an_adapter(tmp_path):
    peft = needs.package("peft", "adapters")
    ids = tokens()
    model = hf.convert(llama(), learned)
    lora = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["fenchel_regularizer"], task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, lora)
    optimizer = torch.optim.Adam(adapted.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(ids, labels=ids).loss.backward()
        optimizer.step()
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(hf.convert(llama(), learned), tmp_path)
    before = logits(adapted.eval(), input_ids=ids)
    assert (logits(again.eval(), input_ids=ids) - before).abs().max() <= 1e-5
    fresh = logits(hf.convert(llama(), learned).eval(), input_ids=ids)
    assert (fresh - before).abs().max() > 1e-3


def test_offloaded_weights(tmp_path):
    """They are on no device until they are used; what attentions hold is somewhere."""
    accelerate = needs.package("accelerate", "offloading")
    model, ids = llama().eval(), tokens()
    expected = logits(hf.convert(llama().eval(), learned), input_ids=ids)
    accelerate.cpu_offload(model, torch.device("cpu"))
    hf.convert(model, learned)
    assert {alpha.device.type for alpha in alphas(model)} == {"cpu"}
    assert (logits(model, input_ids=ids) - expected).abs().max() <= 1e-5


def test_softmax_frees_what_it_kept():
    """Held losses keep no activations once they were differentiated, and a second time raises."""
    q, k, v = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
    loss = fl.attention(q, k, v, fl.Shannon()).square().sum()
    loss.backward(retain_graph=True)
    first = q.grad.clone()
    loss.backward()
    assert torch.equal(q.grad, 2 * first)
    node = loss.grad_fn
    while "_Fused" not in node.name():
        node = node.next_functions[0][0]
    assert node.output is None
    assert node.inputs is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_budget_that_the_first_tokens_cannot_spend_is_refused():
    with pytest.raises(ValueError, match=r"Budget\(3\) needs as many keys"):
        hf.convert(llama(), fl.Budget(3.0))
    assert logits(hf.convert(tiny("bert"), fl.Budget(3.0)), **inputs("bert")).isfinite().all()


@pytest.mark.parametrize("name", ["fenchel:tsallis-1.3", "fenchel:shannon-0.5", "fenchel:norm-2.0"])
def test_names_that_say_their_numbers_need_no_registering(name):
    code = (
        "import fenchel.hf; from transformers import AutoModel, BertConfig; import sys; "
        "config = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, "
        "num_attention_heads=4, intermediate_size=48, attn_implementation=sys.argv[1]); "
        "print(AutoModel.from_config(config).config._attn_implementation)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip().endswith(name)


def _per_head(*numbers):
    return torch.tensor(numbers)[:, None]


@pytest.mark.parametrize(
    "make",
    [
        lambda: fl.Tsallis(torch.tensor([[1.37]])),
        lambda: fl.Tsallis(torch.tensor(1.37)),
        lambda: fl.Tsallis(1.5, temperature=_per_head(0.5, 1.0, 2.0, 3.0)),
        lambda: fl.Tsallis(torch.nn.Parameter(_per_head(1.1, 1.3, 1.5, 1.7))),
        lambda: fl.Shannon(_per_head(0.5, 1.0, 2.0, 3.0)),
        lambda: fl.Norm(_per_head(2.0, 3.0, 2.0, 4.0)),
        lambda: fl.Shannon(1e-3),
    ],
)
def test_every_regulariser_of_ours_is_saved(make, tmp_path):
    model, ids = hf.convert(llama().eval(), lambda _: make()), tokens()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="fenchel:held").eval()
    assert (logits(again, input_ids=ids) - logits(model, input_ids=ids)).abs().max() <= 1e-5
    trained = [name for name, x in model.named_parameters() if x.requires_grad]
    assert trained == [name for name, x in again.named_parameters() if x.requires_grad]


class Plain(fl.Shannon):
    """Neither a dataclass nor ours."""


def test_one_of_your_own_cannot_be_made_again_and_says_so(tmp_path):
    model = hf.convert(llama().eval(), lambda _: Plain())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="fenchel:held")
    with pytest.raises(ValueError, match="holds no regulariser; give it one"):
        again(tokens())
