"""What a page shows of experts over the rounds."""

from fedmoe.report import expert_figures
from fedmoe.report.methods import group
from fedmoe.report.runs import StoredRun


def watched(result, num_experts=3, rows=10, of="label"):
    loads = [(k + 1) / sum(range(1, num_experts + 1)) for k in range(num_experts)]
    history = [{**event, "experts": {"load": loads, "usage_entropy": 0.5}} for event in result["history"]]
    shares = [[float(k == row % num_experts) for k in range(num_experts)] for row in range(rows)]
    return result | {"history": history, "assignment": {"of": of, "shares": shares}}


def test_experts_are_shown_by_load_entropy_and_map(make_results):
    run = watched(make_results(("fedavg",), classes=10)[0], num_experts=4)
    load, entropy, shares = expert_figures.expert_figures(group([run])[0], StoredRun(run))
    assert [one["name"] for one in load.data["views"][0]["series"]] == [f"expert {k}" for k in range(4)]
    assert entropy.data["views"][0]["series"][0]["points"][0] == [1, 0.5]
    assert shares.data["rows"] == [str(k) for k in range(10)] and "label 5: expert 1" in shares.alt


def test_maps_of_earlier_rounds_come_before_the_last(make_results):
    run = watched(make_results(("fedavg",))[0], of="client", rows=2)
    maps = [{"round": number, "of": "client", "shares": [[1, 0, 0], [0, 1, 0]]} for number in (1, 7)]
    figure = expert_figures.expert_figures(group([run])[0], StoredRun(run, expert_maps=maps))[-1]
    assert [frame["label"] for frame in figure.data["frames"]] == ["round 1", "round 7"]
    assert figure.data["row"] == "Client"


def test_one_expert_or_none_draws_nothing(make_results):
    plain = make_results(("fedavg",))[0]
    for run in (plain, watched(plain, num_experts=1)):
        assert expert_figures.expert_figures(group([run])[0], StoredRun(run)) == []


def test_divergence_is_the_mean_over_experts_that_were_sent_and_over_seeds(make_results):
    first, second = make_results(("fedavg",), seeds=2, rounds=2)
    for run, values in ((first, [0.2, None, 0.4]), (second, [0.5])):
        for event in run["history"]:
            event["experts"] = {"load": [1.0], "divergence": values}
    second["history"][1]["experts"]["divergence"] = [None]  # nobody sent it in this round
    figure = expert_figures.divergence(group([first, second]))
    assert figure.data["views"][0]["series"] == [{"name": "FedAvg", "place": 0, "points": [[1, 0.4], [2, 0.3]]}]
    assert "from 0.4 to 0.3" in figure.alt
    assert expert_figures.divergence(group(make_results(("fedavg",)))) is None


def test_a_sliding_mean_looks_back_over_a_twentieth_of_the_rounds():
    smooth = expert_figures.sliding_mean([(n, float(n % 2)) for n in range(1, 41)])
    assert smooth[0] == (1, 1.0) and {value for _, value in smooth[1:]} == {0.5}


def test_each_expert_has_a_line_beside_the_common_expert_for_new_clients_first(make_results):
    (run,) = make_results(("fedavg",))
    unseen = {"expert_accuracy:0": 0.5, "expert_accuracy:10": 0.7, "expert_accuracy:2": 0.6, "common_accuracy": 0.4}
    run["curve"] = [{"round": n, "metrics": {"own": {"expert_accuracy:0": 0.1}, "unseen": unseen}} for n in (1, 2)]
    (view,) = expert_figures.expert_accuracy(group([run])).data["views"]
    assert [one["name"] for one in view["series"]] == ["expert 0", "expert 2", "expert 10", "common expert"]
    assert view["series"][2]["points"] == [[1, 0.7], [2, 0.7]]
    assert expert_figures.expert_accuracy(group(make_results(("fedavg",)))) is None
