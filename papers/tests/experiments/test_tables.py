"""Tables from hand-made results whose numbers are known."""

import json

import pytest

from papers.experiments.tables import over_seeds, read_results
from papers.experiments.vit.tables import listings as vit_listings
from papers.experiments.vqa.tables import listings as vqa_listings

DECAY = {"weight_decay": 0.05}
SIZE = {"width": 64, "layers": 3, "heads": 4, "dropout": 0.0}


def document(data, attention, seed, scores, rate=1e-3, variant=None, facts=None, **cost):
    usual = {"steps": 1200, "seconds": 60.0, "flops": 3.25e12, "parameters": 102_500, "threads": 1}
    return {
        "settings": {
            "study": "vit",
            "preset": "cpu",
            "data": data,
            "variant": variant or attention,
            "attention": attention,
            "sharing": 0.5 if attention == "transport" else 0.0,
            "size": dict(SIZE),
            "training": {"seed": seed, "rate": rate, "steps": 1200, "batch": 8} | DECAY,
        },
        "note": "",
        "scores": scores,
        "facts": facts or {},
        "cost": usual | cost,
        "curve": [],
        "versions": {"fenchel": "1.2.3"},
    }


def titled(listings, text):
    (listing,) = [listing for listing in listings if text in listing.title]
    return [tuple(listing.header), *(tuple(row) for row in listing.rows)]


# ---- the vision transformer


def image_runs():
    """Two seeds have t = 12.7062: the half of the interval is 6.3531 times their distance."""
    accuracies = {
        ("fashion-mnist", "softmax"): (0.80, 0.82),
        ("fashion-mnist", "transport"): (0.81, 0.83),
        ("fashion-mnist", "entmax"): (0.79,),
        ("cifar-10", "softmax"): (0.50, 0.51),
        ("cifar-10", "transport"): (0.50, 0.53),
    }
    return [
        document(data, attention, seed, {"test accuracy": value}, seconds=60.0 + 10 * seed)
        for (data, attention), values in accuracies.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.smoke
def test_table_2():
    assert titled(vit_listings(image_runs()), "Table 2") == [
        ("", "fashion-mnist", "cifar-10"),
        ("ViT", "81.00 ± 12.71", "50.50 ± 6.35"),
        ("OT-ViT", "82.00 ± 12.71", "51.50 ± 19.06"),
        ("ViT, entmax-1.5", "79.00", "–"),
    ]


def test_differences_with_a_star_where_the_interval_leaves_zero_out():
    assert titled(vit_listings(image_runs()), "Difference to ViT") == [
        ("", "fashion-mnist", "cifar-10"),
        ("OT-ViT − ViT", "+1.00 ± 0.00", "+1.00 ± 12.71"),  # two seeds do not tell
        ("ViT, entmax-1.5 − ViT", "−1.00", "–"),
    ]
    third = [
        document("fashion-mnist", attention, 2, {"test accuracy": value})
        for attention, value in (("softmax", 0.80), ("transport", 0.811))
    ]
    row = titled(vit_listings([*image_runs(), *third]), "Difference to ViT")[1]
    assert row[:2] == ("OT-ViT − ViT", "+1.03 ± 0.14 *")


def test_table_1_by_rate():
    others = [
        document("cifar-10", "softmax", 0, {"test accuracy": 0.4}, 3e-3, "softmax-rate-0.003"),
        document("cifar-10", "transport", 0, {"test accuracy": 0.45}, 3e-5, "transport-rate-3e-05"),
    ]
    listings = vit_listings(image_runs() + others)
    assert titled(listings, "Table 1: test accuracy on cifar-10") == [
        ("", "0.003", "0.001", "3e-05"),
        ("ViT", "40.00", "50.50 ± 6.35", "–"),
        ("OT-ViT", "–", "51.50 ± 19.06", "45.00"),
    ]
    assert titled(listings, "Table 2") == titled(vit_listings(image_runs()), "Table 2")
    assert not [x for x in vit_listings(image_runs()) if "Table 1" in x.title]


def test_costs():
    rows = titled(vit_listings(image_runs()), "Cost")
    assert rows[1] == ("ViT", "cifar-10", "2", "102,500", "1,200", "65", "3.25")
    assert rows[-1] == ("ViT, entmax-1.5", "fashion-mnist", "1", "102,500", "1,200", "60", "3.25")
    assert [row[0] for row in rows[3:]] == ["ViT", "OT-ViT", "ViT, entmax-1.5"]


def test_no_run_no_table():
    assert vit_listings([]) == []
    assert vqa_listings([]) == []


# ---- questions


def scores(overall, yes=0.6, number=None):
    by_kind = {"accuracy": overall, "yes/no": yes, "other": 0.25}
    return by_kind if number is None else by_kind | {"number": number}


def selected(overall, first):
    """For each penalty: scores, and how often 1 to 5 modes."""
    modes = [first, round(1 - first, 5), 0.0, 0.0, 0.0]
    return {
        penalty: {"scores": scores(overall + plus), "modes": modes}
        for penalty, plus in (("10", 0.0), ("100", 0.01), ("500", 0.02))
    }


def question_runs():
    looked = {"mass": 0.5, "area": 0.125, "hit": 0.75}
    return [
        document("shapes", "2-mca-16", 0, scores(0.77)),
        document("shapes", "continuous-softmax-9", 0, scores(0.70)),
        document(
            "shapes",
            "continuous-softmax-16",
            0,
            scores(0.75, number=0.5),
            facts={"selection": selected(0.7, 0.25), "agreement": looked},
        ),
        document("shapes", "continuous-sparsemax-16", 0, scores(0.74)),
        document("shapes", "sparsemax", 0, scores(0.73)),
        document("shapes", "softmax", 0, scores(0.72, 0.5), facts={"agreement": looked}),
        document("shapes", "softmax", 1, scores(0.74, 0.7), facts={}),
        document("shapes", "question-only", 0, scores(0.30)),
        document("shapes", "question-only", 1, scores(0.32)),
    ]


@pytest.mark.smoke
def test_table_6_2():
    assert titled(vqa_listings(question_runs()), "Table 6.2") == [
        ("attention", "N", "λ", "yes/no", "number", "other", "overall"),
        ("question only", "–", "–", "60.00 ± 0.00", "–", "25.00 ± 0.00", "31.00 ± 12.71"),
        ("discrete softmax", "–", "–", "60.00 ± 127.06", "–", "25.00 ± 0.00", "73.00 ± 12.71"),
        ("discrete sparsemax", "–", "–", "60.00", "–", "25.00", "73.00"),
        ("2D continuous softmax", "16", "–", "60.00", "50.00", "25.00", "75.00"),
        ("2D continuous softmax", "9", "–", "60.00", "–", "25.00", "70.00"),
        ("2D continuous sparsemax", "16", "–", "60.00", "–", "25.00", "74.00"),
    ]


def test_table_6_3():
    assert titled(vqa_listings(question_runs()), "Table 6.3") == [
        ("attention", "N", "λ", "yes/no", "number", "other", "overall"),
        ("2-MCA", "16", "–", "60.00", "–", "25.00", "77.00"),
        ("test-MCA", "16", "10", "60.00", "–", "25.00", "70.00"),
        ("test-MCA", "16", "100", "60.00", "–", "25.00", "71.00"),
        ("test-MCA", "16", "500", "60.00", "–", "25.00", "72.00"),
    ]


def test_table_6_4():
    rest = ("0.00", "0.00", "0.00")
    assert titled(vqa_listings(question_runs()), "Table 6.4") == [
        ("N", "λ", "K* = 1", "K* = 2", "K* = 3", "K* = 4", "K* = 5"),
        *(("16", penalty, "25.00", "75.00", *rest) for penalty in ("10", "100", "500")),
    ]


def test_differences_of_questions():
    rows = {row[0]: row[1:] for row in titled(vqa_listings(question_runs()), "same seed")[1:]}
    assert rows["question only"] == ("−42.00 ± 0.00", "–", "–")
    assert rows["discrete softmax"] == ("–", "+42.00 ± 0.00", "–")
    assert rows["2D continuous softmax, N = 16"] == ("+3.00", "+45.00", "–")
    assert rows["2-MCA, N = 16"] == ("+5.00", "+47.00", "+2.00")
    assert rows["test-MCA, N = 16, λ = 100"] == ("−1.00", "+41.00", "−4.00")
    chosen = [f"test-MCA, N = 16, λ = {penalty}" for penalty in (10, 100, 500)]
    assert list(rows)[-4:] == ["2-MCA, N = 16", *chosen]


def test_equal_accuracies_differ_by_nothing():
    """Which is not the same as the row that is compared with."""
    runs = [document("shapes", name, 0, scores(0.5)) for name in ("softmax", "entmax")]
    rows = {row[0]: row[1] for row in titled(vqa_listings(runs), "same seed")[1:]}
    assert rows == {"discrete softmax": "–", "discrete entmax-1.5": "+0.00"}


def test_agreement():
    assert titled(vqa_listings(question_runs()), "what the question is about") == [
        ("attention", "mass inside", "its area", "largest weight near"),
        ("discrete softmax", "50.00", "12.50", "75.00"),
        ("2D continuous softmax, N = 16", "50.00", "12.50", "75.00"),
    ]


def test_tables_without_rows_are_left_out_and_data_sets_stand_apart():
    runs = [document(data, "softmax", 0, scores(0.5)) for data in ("shapes", "easy")]
    titles = [listing.title for listing in vqa_listings(runs)]
    assert [title.split(":")[0] for title in titles] == ["easy", "easy", "shapes", "shapes", "Cost"]
    assert not [title for title in titles if "6.3" in title or "6.4" in title]


# ---- what tables do not know


def test_unknown_attentions_and_data_stand_under_their_own_names():
    runs = [
        *image_runs(),
        document("svhn", "hopfield", 0, {"test accuracy": 0.9}),
        document("svhn", "softmax", 0, {"test accuracy": 0.8}),
    ]
    table = titled(vit_listings(runs), "Table 2")
    assert table[0] == ("", "fashion-mnist", "cifar-10", "svhn")
    assert table[-1] == ("hopfield", "–", "–", "90.00")
    assert titled(vit_listings(runs), "Difference")[-1][0::3] == ("hopfield − ViT", "+10.00")
    more = [*question_runs(), document("shapes", "hopfield", 0, scores(0.9))]
    assert titled(vqa_listings(more), "Table 6.2")[-1][0::6] == ("hopfield", "90.00")
    assert titled(vqa_listings(more), "Cost")[-1][0] == "hopfield"


def test_differences_without_softmax_lose_no_row():
    runs = [document("cifar-10", "transport", 0, {"test accuracy": 0.9})]
    assert titled(vit_listings(runs), "Difference")[1:] == [("OT-ViT − ViT", "–")]


def test_two_runs_of_one_seed_are_refused():
    twin = document("cifar-10", "softmax", 0, {"test accuracy": 0.9}, variant="softmax-b")
    with pytest.raises(ValueError, match="two runs of seed 0"):
        vit_listings([*image_runs(), twin])


@pytest.mark.parametrize("name", ["parameters", "steps", "flops"])
def test_costs_that_do_not_agree_are_refused(name):
    runs = [document("toy", "softmax", 0, {"test accuracy": 0.9})]
    runs.append(document("toy", "softmax", 1, {"test accuracy": 0.9}, **{name: 7}))
    with pytest.raises(ValueError, match=f"softmax on toy have different {name}: 7, "):
        vit_listings(runs)
    for run in runs:
        run["settings"]["training"]["patience"] = 3  # those may stop at different steps
    vit_listings(runs)


# ---- files


def write(folder, *runs):
    """folder: of the results. Given back: that of the preset."""
    preset = folder / "vit" / "cpu"
    for run in runs:
        settings = run["settings"]
        path = preset / settings["data"] / f"{settings['variant']}-{settings['training']['seed']}"
        path.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.json").write_text(json.dumps(run))
        for inside in ("step-00000003.json", "config.json", "kept-maps.json", "metrics.jsonl"):
            (path / inside).write_text("{}")
    return preset


def test_results_are_read_and_checkpoints_are_not(tmp_path):
    other = document("fashion-mnist", "softmax", 0, {}, 3e-3, "softmax-rate-0.003")
    runs = [*image_runs()[:2], other]
    preset = write(tmp_path, *runs)
    begun = preset / "fashion-mnist" / "transport-0"
    begun.mkdir()
    (begun / "step-00000016.json").write_text("{}")
    assert read_results(preset) == runs
    assert read_results(tmp_path / "nowhere") == []
    (preset / "fashion-mnist" / "softmax-2.json").write_text("{")
    with pytest.raises(ValueError, match=r"softmax-2\.json is no result"):
        read_results(preset)


@pytest.mark.parametrize(
    "place", ["cifar-10/softmax-7", "cifar-10/softmax-0 (copy)", "cifar-10/backup", "toy/softmax-0"]
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, place):
    run = document("cifar-10", "softmax", 0, {"test accuracy": 0.9})
    preset = write(tmp_path, run)
    assert read_results(preset) == [run]
    wrong = preset / f"{place}.json"
    wrong.parent.mkdir(exist_ok=True)
    wrong.write_text(json.dumps(run))
    with pytest.raises(ValueError, match=r"holds the run vit/cpu/cifar-10/softmax-0\.json"):
        read_results(preset)


def test_a_run_of_another_preset_is_refused(tmp_path):
    preset = write(tmp_path, document("cifar-10", "softmax", 0, {"test accuracy": 0.9}))
    preset.rename(tmp_path / "vit" / "paper")
    with pytest.raises(ValueError, match=r"holds the run vit/cpu/cifar-10/softmax-0\.json"):
        read_results(tmp_path / "vit" / "paper")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"size": {"width": 8, "layers": 3, "heads": 4, "dropout": 0.0}},
            "size.width was 64, is 8",
        ),
        ({"data_digest": "0123"}, "data_digest was None, is '0123'"),
        ({"training": {"steps": 7}}, "training.steps was 1200, is 7"),
        ({"training": {"weight_decay": 0.0}}, "training.weight_decay was 0.05, is 0.0"),
    ],
)
@pytest.mark.parametrize("attention", ["softmax", "transport"])
def test_runs_of_other_settings_make_no_table(tmp_path, changed, text, attention):
    runs = [document("cifar-10", a, s, {}) for a, s in (("softmax", 0), (attention, 1))]
    settings = runs[1]["settings"]
    training = settings["training"] | changed.get("training", {})
    runs[1]["settings"] = settings | changed | {"training": training}
    with pytest.raises(ValueError, match=rf"softmax-0\.json and .*{attention}-1\.json .*{text}"):
        read_results(write(tmp_path, *runs))
    elsewhere = document("cifar-100", "softmax", 0, {})  # may be of others
    elsewhere["settings"]["size"] |= {"width": 8}
    assert len(read_results(write(tmp_path / "apart", runs[0], elsewhere))) == 2


def test_rates_differ_between_rows_only(tmp_path):
    rows = [document("cifar-10", "softmax", 0, {}), document("cifar-10", "transport", 0, {}, 3e-2)]
    assert len(read_results(write(tmp_path / "rows", *rows))) == 2
    seeds = [document("cifar-10", "softmax", 0, {}), document("cifar-10", "softmax", 1, {}, 3e-2)]
    with pytest.raises(ValueError, match=r"training\.rate was 0\.001, is 0\.03"):
        read_results(write(tmp_path / "seeds", *seeds))


def test_one_seed_tells_no_interval():
    runs = [{"settings": {"training": {"seed": seed}}} for seed in (0, 0, 1)]
    assert over_seeds(runs[:2]) == "one seed"
    assert over_seeds(runs) == "mean ± 95 % interval over seeds"
