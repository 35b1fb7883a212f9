"""A preference that depends on content, on a task of filling in a blank.

Twelve facts, and a question: `Ann likes ___`. Of the four facts about Ann one answers it: `Ann does
like tea`, or `Ann does not dislike tea`. A fact is the sum of its words' embeddings, and the score
of a head, linear in it, cannot tell two negations or none from one. A `ContentPreference`, which is
a network of each fact alone, can. The control has a network of that size on the facts themselves.

    python examples/12_fill_in_the_blank.py
"""

from __future__ import annotations

import torch
from _data import add_steps, parser, steps_of, track
from torch import Tensor, nn

import fenchel as fl

PEOPLE = ["Ann", "Ben", "Cleo", "Dan"]
DRINKS = ["tea", "rum", "milk", "cocoa", "water", "cider", "mead", "coffee", "wine", "beer", "ale"]
DRINKS += ["juice"]
WORDS = [*PEOPLE, *DRINKS, "does", "does not", "like", "dislike", "likes", "___"]
DOES, LIKE, BLANK = (WORDS.index(word) for word in ("does", "like", "likes"))
WIDTH, HEADS = 32, 4


def draw(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Facts (size, 12, 4) and questions (size, 3) in words, and the drinks asked for (size,)."""
    who = torch.rand(size, 4).argsort(-1)[:, :3]  # three people,
    drink = torch.rand(size, 12).argsort(-1).reshape(size, 3, 4)  # four facts about each,
    liked = torch.nn.functional.one_hot(torch.randint(4, (size, 3)), 4)  # one of which is liked
    denied = torch.randint(2, (size, 3, 4))
    verb = denied ^ (1 - liked)  # `not` and `dislike` together are liking again
    parts = who.unsqueeze(-1).expand_as(drink), DOES + denied, LIKE + verb, len(PEOPLE) + drink
    facts = torch.stack(parts, -1).flatten(1, 2)
    asked = torch.randint(3, (size, 1))
    blank = torch.tensor([[BLANK, BLANK + 1]]).expand(size, 2)
    question = torch.cat([who.gather(1, asked), blank], 1)
    return facts, question, (drink * liked).sum(-1).gather(1, asked)[:, 0]


class Reader(nn.Module):
    def __init__(self, preference: bool, network: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        chosen = fl.nn.ContentPreference(WIDTH, HEADS) if preference else None
        self.attention = fl.nn.PreferenceAttention(WIDTH, HEADS, preference=chosen)
        layers = nn.Linear(WIDTH, WIDTH // 2), nn.GELU(), nn.Linear(WIDTH // 2, WIDTH)
        self.network = nn.Sequential(*layers) if network else None
        self.leave = nn.Linear(WIDTH, len(DRINKS))

    def forward(self, facts: Tensor, question: Tensor) -> Tensor:
        """Logits of the drinks."""
        templates, query = self.words(facts).sum(-2), self.words(question).sum(-2, keepdim=True)
        if self.network is not None:
            templates = templates + self.network(templates)
        return self.leave(self.attention(query, templates)[:, 0])


def train(model: Reader, steps: int, seed: int, name: str) -> list[float]:
    """The share of blanks filled in rightly on new texts, halfway and in the end."""
    torch.manual_seed(seed)  # the same texts for every model
    optimizer, shares = torch.optim.Adam(model.parameters(), 3e-3), []
    for step in track(range(1, steps + 1), name):
        facts, question, drink = draw(128)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(facts, question), drink).backward()
        optimizer.step()
        if step in (steps // 2, steps):
            with torch.no_grad():
                facts, question, drink = draw(2000)
                shares.append((model(facts, question).argmax(-1) == drink).double().mean().item())
    return shares


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, "examples/12_fill_in_the_blank.py --steps 200")
    add_steps(options, usual=400, quick=200)
    args = options.parse_args(argv)
    steps, seeds = steps_of(args), 1 if args.quick else 5
    torch.manual_seed(args.seed)
    facts, question, drink = (x[0].tolist() for x in draw(1))
    told = ". ".join(" ".join(WORDS[word] for word in fact) for fact in facts)
    print(f"{told}. {' '.join(WORDS[word] for word in question)} ({DRINKS[drink]})")
    heading = f"weights   step {steps // 2}   step {steps}   worst seed"
    print(f"filled in rightly, {seeds} seed(s)   {heading}")
    ways = {"even preference": (False, False), "network on the facts": (False, True)}
    ways |= {"content preference": (True, False)}
    for name, way in ways.items():
        shares = []
        for seed in range(args.seed, args.seed + seeds):
            torch.manual_seed(seed)
            model = Reader(*way)
            shares.append(train(model, steps, seed, f"{name}, seed {seed}"))
        mean, worst = (
            torch.tensor(shares, dtype=torch.double).mean(0).tolist(),
            min(end for _, end in shares),
        )
        size = sum(x.numel() for x in model.parameters())
        print(f"{name:<28}{size:>11}{mean[0]:>11.1%}{mean[1]:>11.1%}{worst:>13.1%}")
    facts, *_ = draw(1000)
    liked = (facts[..., 1] == DOES) == (facts[..., 2] == LIKE)
    with torch.no_grad():
        logs = model.attention.preference(None, model.words(facts).sum(-2))
        mass = (logs.softmax(-1) * liked[:, None, None]).sum(-1).mean((0, 2))
    heads = " ".join(f"{share:.0%}" for share in mass.tolist())
    share = liked.double().mean()
    print(f"the preference alone, on the {share:.0%} of facts that are liked: {heads} by head")


if __name__ == "__main__":
    main()
