"""Converted models train in the trainers that people use, with the losses that softmax has."""

import subprocess
import sys

import pytest
import torch

import fenchel as fl
from tests import needs
from tests.hf.models import hf, logits, transformers
from tests.hf.training import (
    PAD,
    STEPS,
    agree,
    batch,
    converted,
    falls,
    learned,
    llama,
    take_steps,
    texts,
)

EXACT, BFLOAT16 = 1e-4, 0.02
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
SETTINGS = {
    **QUIET,
    "max_steps": STEPS,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 4,
}


def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor(
        [row["input_ids"] + [PAD] * (longest - len(row["input_ids"])) for row in rows]
    )
    labels = ids.masked_fill(ids == PAD, -100)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def logged(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def by_trainer(choice, folder, collator=pad, **settings):
    needs.package("accelerate", "training by transformers' Trainer")
    arguments = transformers.TrainingArguments(str(folder), **SETTINGS, **settings)
    return logged(
        transformers.Trainer(
            model=converted(choice), args=arguments, train_dataset=texts(), data_collator=collator
        )
    )


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(bf16, tmp_path):
    digits = BFLOAT16 if bf16 else EXACT
    dense, same, sparse = (
        by_trainer(name, tmp_path, bf16=bf16)
        for name in ("sdpa", "fenchel:softmax", "fenchel:entmax15")
    )
    assert agree(same, dense, digits)
    assert falls(sparse)
    assert not agree(sparse, dense, digits)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("choice", ["fenchel:entmax15", learned])
def test_gradient_checkpointing(choice, reentrant, tmp_path):
    """The same losses: what is computed again is the same, alphas and their gradients included."""
    stored = by_trainer(choice, tmp_path)
    again = by_trainer(
        choice,
        tmp_path,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    assert agree(again, stored, EXACT)
    assert falls(again)


@pytest.mark.parametrize("choice", ["fenchel:softmax", "fenchel:entmax15", learned])
def test_flattened_batches_are_padded_ones(choice, tmp_path):
    """The same tokens and the same mean over them: the losses say that texts stay apart."""
    flat = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    padded = by_trainer(choice, tmp_path)
    assert agree(by_trainer(choice, tmp_path, flat), padded, EXACT)
    joined = transformers.DataCollatorWithFlattening(return_position_ids=False)
    assert not agree(by_trainer(choice, tmp_path, joined), padded, EXACT)


@pytest.mark.parametrize("late", [False, True])
def test_accelerator_in_bfloat16(late):
    """Converted before `prepare`, or after it."""
    accelerate = needs.package("accelerate", "training by accelerate")
    losses = []
    for choice in ("sdpa", "fenchel:softmax", learned):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        model = llama() if late else converted(choice)
        model = accelerator.prepare(model)
        if late and choice != "sdpa":
            hf.convert(model, choice)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses.append(take_steps(model, batch(), optimizer, accelerator.backward))
    accelerate.state.AcceleratorState._reset_state(True)
    dense, same, sparse = losses
    assert agree(same, dense, BFLOAT16)
    assert falls(sparse)
    assert not agree(sparse, dense, BFLOAT16)


def by_sft(choice, folder, **settings):
    trl = needs.package("trl", "training by TRL")
    datasets = needs.package("datasets", "training by TRL")
    from tokenizers import Tokenizer, models

    words = {"<unk>": 0, "<pad>": PAD, "</s>": 2}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    datasets.disable_progress_bars()
    trainer = trl.SFTTrainer(
        model=converted(choice),
        args=trl.SFTConfig(str(folder), **SETTINGS, **settings),
        train_dataset=datasets.Dataset.from_list(texts()),
        processing_class=tokenizer,
    )
    return logged(trainer)


SFT = {
    "defaults": {},
    "packed": {"packing": True, "max_length": 24},
    "padding-free": {"padding_free": True, "max_length": None},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of TRL and what it stands on are not ours
@pytest.mark.parametrize("way", SFT)
@pytest.mark.parametrize("bf16", [None, False])  # None: TRL's default, bfloat16
def test_sft_trainer(way, bf16, tmp_path):
    digits = EXACT if bf16 is False else BFLOAT16
    dense, same, sparse = (
        by_sft(name, tmp_path, bf16=bf16, **SFT[way])
        for name in ("sdpa", "fenchel:softmax", "fenchel:entmax15")
    )
    assert agree(same, dense, digits)
    assert falls(sparse)
    assert not agree(sparse, dense, digits)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("choice", ["fenchel:softmax", "fenchel:entmax15"])
def test_sft_without_padding_is_sft_with_it(choice, tmp_path):
    padded = by_sft(choice, tmp_path, bf16=False)
    free = by_sft(choice, tmp_path, bf16=False, **SFT["padding-free"])
    assert agree(free, padded, EXACT)


LOADING = """
import sys, torch, peft, fenchel as fl
from fenchel import hf
from transformers import LlamaForCausalLM
folder = sys.argv[1]
model = LlamaForCausalLM.from_pretrained(folder + "/base")
hf.convert(model, lambda layer: fl.nn.LearnedTsallis(layer.config.num_attention_heads))
model = peft.PeftModel.from_pretrained(model, folder + "/adapter").eval()
torch.save(model(torch.load(folder + "/ids.pt")).logits.detach(), folder + "/logits.pt")
"""


@pytest.mark.slow
def test_an_adapter_brings_its_alphas_to_another_process(tmp_path):
    peft = needs.package("peft", "adapters")
    llama().save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["fenchel_regularizer"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(converted(learned), lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert falls(take_steps(model, batch(), torch.optim.Adam(trained, lr=0.05)))
    model.save_pretrained(tmp_path / "adapter")
    torch.save(batch(), tmp_path / "ids.pt")
    subprocess.run([sys.executable, "-c", LOADING, str(tmp_path)], check=True)
    here, there = logits(model.eval(), input_ids=batch()), torch.load(tmp_path / "logits.pt")
    assert (here - there).abs().max() <= 1e-5
    with model.disable_adapter():
        assert (logits(model, input_ids=batch()) - there).abs().max() > 1e-2


def test_what_trains_comes_before_the_adapter():
    """Adapters save the parameters that they know."""
    peft = needs.package("peft", "adapters")
    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), lora)
    for part in (model, model.base_model.model):
        with pytest.raises(ValueError, match="convert the model first"):
            hf.convert(part, learned)
    hf.convert(model, fl.Tsallis(1.3))
    assert falls(take_steps(model, batch(), torch.optim.Adam(model.parameters(), lr=0.05)))
