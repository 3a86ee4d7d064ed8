"""Is federation worth it for me?"""

from fedmoe.report.clients import client_table, own_global, strips, worth, worth_figure


def with_accuracies(result, own, model="after"):
    """Own accuracies of some clients, by number."""
    scores = [
        s | {"accuracy": own[s["client"]]} if s["data"] == "own" and s["model"] == model and s["client"] in own else s
        for s in result["scores"]
    ]
    return result | {"scores": scores}


def test_clients_that_lose_against_training_alone_are_listed_worst_first(make_results):
    alone, tuned = make_results(("local_only", "fine_tuned"), clients=3)
    alone = with_accuracies(alone, {0: 0.5, 1: 0.6, 2: 0.7})
    tuned = with_accuracies(tuned, {0: 0.9, 1: 0.55, 2: 0.5}) | {"client_names": {"2": "coast"}}
    table = worth([alone, tuned])
    (row,) = table.rows
    assert table.reference == "training alone" and table.alone.title == "Local"
    assert (row.title, row.clients, row.harmed) == ("Fine-tuned", 3, 2)
    assert [(name, round(lost, 3)) for name, lost in row.worst] == [("coast", 0.2), ("1", 0.05)]
    assert round(row.gain, 4) == round((0.4 - 0.05 - 0.2) / 3, 4)
    assert "Fine-tuned: 2 of 3 clients lose" in worth_figure(table).alt


def test_without_a_run_alone_personalising_is_compared_with_the_shared_model(make_results):
    (tuned,) = make_results(("fine_tuned",), clients=2)
    tuned = with_accuracies(with_accuracies(tuned, {0: 0.5, 1: 0.5}, "before"), {0: 0.4, 1: 0.8})
    table = worth([tuned])
    assert table.alone is None and "before personalisation" in table.reference
    assert table.rows[0].harmed == 1 and table.rows[0].worst[0][0] == "0"


def test_clients_are_compared_within_their_seed(make_results):
    results = make_results(("local_only", "fine_tuned"), seeds=2, clients=4)
    row = worth(results).rows[0]
    assert row.clients == 8 and all("(seed " in name for name, _ in row.worst)
    other_seed = [r for r in results if r["algorithm"] == "fine_tuned" or r["seed"] == 1]
    assert worth(other_seed).rows[0].clients == 4


def test_a_method_with_nothing_to_compare_has_no_row(make_results):
    assert worth(make_results(("fedavg",))).rows == [] and worth_figure(worth(make_results(("fedavg",)))) is None


def test_the_page_holds_every_client_once_per_method_and_seed(make_results):
    table = client_table(make_results(("fedavg", "fine_tuned"), seeds=2, clients=5, unseen=3))
    assert [(one["place"], one["seed"], len(one["clients"])) for one in table] == [
        (0, 0, 5), (0, 1, 5), (1, 0, 5), (1, 1, 5),
    ]  # fmt: skip
    assert table[0]["before"] == [None] * 5 and None not in table[2]["before"]


def test_no_scores_no_figures_of_clients(make_results):
    nobody = [make_results(("fedavg",))[0] | {"scores": []}]
    assert strips(nobody) is own_global(nobody) is None
