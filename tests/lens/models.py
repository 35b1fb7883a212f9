"""Small random models of each family, sharp enough that attention is far from even."""

import numpy as np
import torch

from tests import needs

transformers = needs.package("transformers", "fenchel.lens on models of Hugging Face")

PAD, VOCABULARY, TOKENS = 1, 40, 9
_NAMES = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_T5_SIZES = {
    "d_model": 32,
    "d_kv": 6,  # not 32 / 4: d' and the width must not be mistaken for one another
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}


def _make(model, config, sizes, **more):
    settings = getattr(transformers, config)(**_NAMES, **sizes, **more)
    return getattr(transformers, model)(settings)


BUILDERS = {
    "bert": lambda: _make("BertModel", "BertConfig", _SIZES, max_position_embeddings=32),
    "bert-mlm": lambda: _make("BertForMaskedLM", "BertConfig", _SIZES, max_position_embeddings=32),
    "bert-causal": lambda: _make(
        "BertModel", "BertConfig", _SIZES, max_position_embeddings=32, is_decoder=True
    ),
    "roberta": lambda: _make("RobertaModel", "RobertaConfig", _SIZES, max_position_embeddings=40),
    "t5": lambda: _make("T5ForConditionalGeneration", "T5Config", _T5_SIZES),
    "t5-bare": lambda: _make("T5Model", "T5Config", _T5_SIZES),
    "t5-encoder": lambda: _make("T5EncoderModel", "T5Config", _T5_SIZES),
    "mt5": lambda: _make("MT5ForConditionalGeneration", "MT5Config", _T5_SIZES),
}
CASES = [
    ("bert", "encoder"),
    ("bert-mlm", "encoder"),
    ("roberta", "encoder"),
    ("t5", "encoder"),
    ("t5", "decoder"),
    ("t5", "cross"),
    ("t5-bare", "decoder"),
    ("t5-encoder", "encoder"),
    ("mt5", "encoder"),
    ("mt5", "cross"),
]


def model_of(name, dtype=torch.float64, implementation="eager"):
    """All parameters random, biases of keys and queries too."""
    torch.manual_seed(0)
    model = BUILDERS[name]().to(torch.float64).eval()
    for path, parameter in model.named_parameters():
        if "LayerNorm" not in path and "layer_norm" not in path:
            large = 1.0 if "relative_attention_bias" in path else 0.25
            torch.nn.init.normal_(parameter, std=large)
    model.set_attn_implementation(implementation)
    return model.to(dtype)


def save_short_bert(path, words):
    """A BERT of 32 positions, whose tokenizer does not say how long a text may be."""
    model_of("bert", torch.float32).save_pretrained(path)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    transformers.BertTokenizer(vocab=numbers).save_pretrained(path)
    return path


def inputs_of(kind="encoder", side="right"):
    """Three sentences of 9, 6 and 3 tokens; the decoder's are of 7, 7 and 4."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, TOKENS), generator=generator)
    mask = torch.arange(TOKENS) < torch.tensor([9, 6, 3])[:, None]
    if side == "left":
        mask = mask.flip(1)
    inputs = {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}
    if kind != "encoder":
        words = torch.arange(7) < torch.tensor([7, 7, 4])[:, None]
        labels = torch.randint(3, VOCABULARY, (3, 7), generator=generator)
        inputs["labels"] = labels.masked_fill(~words, -100)
    return inputs


def newton(templates, log_preference, evidence, reliability):
    """The exact multiplier of one query, plainly: Newton's ascent of the dual with halved steps.

    templates (n, d), log_preference (n,), evidence (d,), all visible; numpy float64.
    """

    def parts(at):
        scores = log_preference + templates @ at
        top = scores.max()
        weights = np.exp(scores - top)
        value = at @ target - at @ at / (2 * reliability) - np.log(weights.sum()) - top
        return value, weights / weights.sum()

    prior = np.exp(log_preference - log_preference.max())
    prior /= prior.sum()
    log_preference = np.log(prior)
    target = prior @ templates + evidence
    multiplier = np.zeros_like(evidence)
    for _ in range(200):
        value, weights = parts(multiplier)
        mean = weights @ templates
        slope = target - mean - multiplier / reliability
        centred = templates - mean
        curvature = centred.T @ (weights[:, None] * centred) + np.eye(len(evidence)) / reliability
        step, size = np.linalg.solve(curvature, slope), 1.0
        if np.linalg.norm(step) <= 1e-13 * (1 + np.linalg.norm(multiplier)):
            break
        slack = 1e-14 * (1 + abs(value))
        while size > 1e-6 and parts(multiplier + size * step)[0] < value - slack:
            size /= 2
        multiplier = multiplier + size * step
    else:
        raise AssertionError("the reference did not converge")
    return multiplier, parts(multiplier)[1] @ templates, prior @ templates


def reference(templates, log_preference, evidence, reliability=1.0):
    """(multiplier, mean, mean_shift, parameter) of one query, from the definitions."""
    exact, mean, prior_mean = newton(templates, log_preference, evidence, reliability)
    first = reliability * evidence
    raised = log_preference + templates @ first
    weights = np.exp(raised - raised.max())
    apart = np.linalg.norm(weights @ templates / weights.sum() - mean)
    prior = np.exp(log_preference - log_preference.max())
    prior /= prior.sum()
    centred = templates - prior_mean
    covariance = centred.T @ (prior[:, None] * centred)
    return (
        np.linalg.norm(first - exact) / np.linalg.norm(exact),
        apart / np.linalg.norm(mean),
        apart / np.linalg.norm(mean - prior_mean),
        reliability * np.linalg.norm(covariance @ evidence) / np.linalg.norm(evidence),
    )


def read_by_hand(model, inputs, layer, sentence, head, query):
    """Templates, log-preference and evidence of one query of an encoder, without hooks: from the
    hidden states that the model gives out and its weights. The paper's scaling."""
    with torch.no_grad():
        body = model.get_encoder() if model.config.model_type == "t5" else model
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        states = body(**given, output_hidden_states=True).hidden_states[layer][sentence]
        keep = inputs["attention_mask"][sentence].bool()
        if model.config.model_type == "t5":
            part = body.block[layer].layer[0]
            states, size = part.layer_norm(states), model.config.d_kv
            attention = part.SelfAttention
            asked, key = attention.q.weight, attention.k.weight
            n = len(states)
            first = body.block[0].layer[0].SelfAttention
            bias = first.compute_bias(n, n)[0, head, query][keep].numpy()
            scaling, offset = 1.0, 0.0
        else:
            attention = model.encoder.layer[layer].attention.self
            size = attention.attention_head_size
            asked, key = attention.query.weight, attention.key.weight
            bias, scaling = np.zeros(int(keep.sum())), size**-0.5
            offset = attention.query.bias[head * size : (head + 1) * size].numpy()
        rows = slice(head * size, (head + 1) * size)
        turned = asked[rows].numpy() @ states[query].numpy() + offset
        evidence = scaling * np.sqrt(size) * key[rows].numpy().T @ turned
        templates = states[keep].numpy() / np.sqrt(size)
    return (x.astype(np.float64) for x in (templates, bias, evidence))
