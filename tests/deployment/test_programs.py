from dataclasses import replace

import pytest
import torch

import fedmoe
from fedmoe.deployment.programs import traced

TRAINING = {stage: {"epochs": 1} for stage in ("local", "personal")}


def model(algorithm, chosen, clients, vocabulary_size=None):
    federation = replace(fedmoe.federation_from_clients(clients), vocabulary_size=vocabulary_size)
    config = {
        "algorithm": algorithm, "model": chosen, "training": TRAINING, "engine": {"workers": 1},
        "schedule": {"rounds": 1, "clients_per_round": "all"},
    }  # fmt: skip
    return fedmoe.run(config, federation=federation).personal_model("a")


def off_by(made, traced_on, asked):
    program = traced(made, traced_on).module()
    return max(float((program(rows) - made(rows)).abs().max()) for rows in asked)


def test_texts_longer_than_those_that_a_program_was_traced_on():
    """The network skips what is padding for a whole batch: of the batch that is traced, that must not be fixed."""
    texts = torch.randint(1, 20, (12, 7))
    clients = {name: (texts, torch.arange(12) % 2) for name in ("a", "b")}
    made = model({"name": "fine_tuned"}, {"name": "text_lstm", "embedding": 4, "hidden": 3}, clients, 20)
    short = texts.clone()
    short[:, 3:] = 0
    assert off_by(made, short[:2], [texts, short[:1], torch.zeros_like(texts[:3])]) < 1e-6


@pytest.mark.parametrize("algorithm", [{"name": "fedmix", "num_experts": 2}, {"name": "lg_fedavg"}])
def test_experts_with_convolutions_for_any_number_of_rows(algorithm):
    images = torch.randn(12, 1, 16, 16)
    clients = {name: (images, torch.arange(12) % 2) for name in ("a", "b")}
    made = model(algorithm, {"name": "lenet", "channels": [2, 3], "dense": [4]}, clients)
    assert off_by(made, images[:2], [images, images[:1]]) < 1e-6
