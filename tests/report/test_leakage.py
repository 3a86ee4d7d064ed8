"""What a page shows of an audit of labels."""

from fedmoe.report.leakage import leakage_section
from fedmoe.report.page import render
from fedmoe.report.runs import StoredRun

NEAR, FAR = {"mean": 0.1, "nearest": 0.0, "farthest": 0.2}, {"mean": 0.4, "nearest": 0.3, "farthest": 0.5}


def audited(run):
    readings = {"0": [1.25, -0.25], "1": [0.5, 0.5]}
    attacks = [{"attack": "output bias", "round": 1, **NEAR, "clients": readings}]
    truth = {"0": [1.0, 0.0], "1": [0.4, 0.6]}
    return StoredRun(run, labels_audit={"attacks": attacks, "uniform_guess": FAR, "truth": truth, "num_classes": 2})


def test_attacks_stand_beside_a_guess_and_readings_beside_the_truth(make_results):
    (run,) = make_results(("fedavg",), classes=2)
    section = leakage_section([("FedAvg", audited(run)), ("not audited", StoredRun(run))])
    assert [cells[0] for _, cells in section.lines] == ["output bias", "a uniform guess"]
    (figure,) = section.figures
    read, truth = figure.data["frames"]
    assert read["values"] == [[1.0, 0.0], [0.5, 0.5]], "a share is between 0 and 1"
    assert truth["label"] == "the truth" and truth["values"] == [[1.0, 0.0], [0.4, 0.6]]
    assert "0.100 away" in figure.alt


def test_a_report_has_the_section_only_where_runs_were_audited(make_results):
    (run,) = make_results(("fedavg",), classes=2)
    assert "What a server could read of labels" in render([audited(run)], "Audited")
    assert leakage_section([("FedAvg", StoredRun(run))]) is None
