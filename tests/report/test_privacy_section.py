"""What a page says of the privacy that clients have spent."""

from fedmoe.report.methods import group
from fedmoe.report.page import render
from fedmoe.report.privacy import MOST_CLIENTS, privacy_section
from fedmoe.report.runs import StoredRun


def spent(epsilons, no_guarantee=None):
    clients = [
        {
            "client": client, "steps": 6 + client, "sampling_rate": [0.25], "noise_multiplier": [1.1],
            "sensitivity": [1.0], "epsilon": epsilon, "rdp_epsilon": epsilon + 1,
        }
        for client, epsilon in enumerate(epsilons)
    ]  # fmt: skip
    facts = {"delta": 1e-5, "relation": "add or remove one record", "noise_source": "secure"}
    return {**facts, "no_guarantee": no_guarantee, "clients": clients}


def test_the_largest_epsilon_counts_over_clients_and_seeds_and_clients_come_by_what_they_spent(make_results):
    runs = make_results(("fedavg",), seeds=2)
    for run, epsilons in zip(runs, ([1.0, 2.5], [3.0, 0.5]), strict=True):
        run["privacy"] = spent(epsilons)
    section = privacy_section(group(runs))
    ((title, cells),) = section.lines
    assert title == "FedAvg" and cells[:4] == ["3.000", "1e-05", "6 to 7", "1.1"]
    ((title, clients, left_out),) = section.clients
    assert title == "FedAvg, seed 0" and [name for name, _ in clients] == ["1", "0"] and left_out == 0
    page = render([StoredRun(run) for run in runs], "Private")
    assert "The privacy ledger" in page and "add or remove one record" in page and "2.500" in page


def test_where_nothing_is_guaranteed_there_is_a_reason_and_no_epsilon(make_results):
    (run,) = make_results(("fedavg",))
    run["privacy"] = spent([], "Algorithm 1 sends gradients of a mixed loss")
    section = privacy_section(group([run]))
    assert section.lines[0][1][0] == "none" and section.lines[0][1][-1] == "Algorithm 1 sends gradients of a mixed loss"
    assert section.clients == []


def test_runs_without_noise_have_no_such_section_and_many_clients_are_cut(make_results):
    (run,) = make_results(("fedavg",))
    assert privacy_section(group([run])) is None
    assert "privacy ledger" not in render([StoredRun(run)], "Plain")
    run["privacy"] = spent([1.0] * (MOST_CLIENTS + 3))
    assert privacy_section(group([run])).clients[0][2] == 3
