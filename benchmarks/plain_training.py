"""What a careful PyTorch user writes for one client: the local work of the plain loops and of peers that bring none.

Careful means: data in memory, fused optimizers, one thread, validation in one batch, no work that the mathematics does
not need, except that the frozen model of a mixture answers for each batch anew.
"""

import copy
import functools

import torch
import torch.nn.functional as F
from plain_models import make_model
from torch import Tensor, nn
from workloads import Workload, client_data


@functools.cache
def tensors_of(workload: Workload, client: int) -> tuple[Tensor, Tensor]:
    """In memory from the first use on, as for every system."""
    x, y = client_data(workload, client)
    return torch.from_numpy(x), torch.from_numpy(y)


def train_classifier(model: nn.Module, workload: Workload, x: Tensor, y: Tensor) -> None:
    kind = torch.optim.Adam if workload.optimizer == "adam" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=workload.learning_rate, fused=True)
    for _ in range(workload.epochs):
        for rows in torch.randperm(len(y)).split(workload.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


class Mixture(nn.Module):
    """log(h f_s + (1 - h) f_g): gate, specialist, and the general model, which is frozen."""

    def __init__(self, general: nn.Module) -> None:
        super().__init__()
        self.specialist = copy.deepcopy(general)
        self.gate = make_model("cnn", num_outputs=1)
        self.general = copy.deepcopy(general).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            general = F.softmax(self.general(x), 1)
        share = torch.sigmoid(self.gate(x))
        return torch.log(share * F.softmax(self.specialist(x), 1) + (1 - share) * general)


def train_mixture(
    general: nn.Module, workload: Workload, x: Tensor, y: Tensor, *, authors_way: bool = False
) -> dict[str, Tensor]:
    """The best specialist and gate by validation loss.

    `authors_way` does what the published script of the method does: validation in every epoch, one image at a time,
    and the default Adam.
    """
    model = Mixture(general)
    trained = [*model.specialist.parameters(), *model.gate.parameters()]
    optimizer = torch.optim.Adam(trained, workload.learning_rate, fused=None if authors_way else True)
    train, held = slice(0, workload.num_examples), slice(workload.num_examples, None)
    check_every, chunk = (1, 1) if authors_way else (workload.check_every, workload.num_validation)
    least, best = validation_loss(model, x[held], y[held], chunk), copy.deepcopy(model.state_dict())
    for epoch in range(1, workload.epochs + 1):
        for rows in torch.randperm(workload.num_examples).split(workload.batch_size):
            optimizer.zero_grad()
            F.nll_loss(model(x[train][rows]), y[train][rows]).backward()
            optimizer.step()
        if epoch % check_every == 0:
            loss = validation_loss(model, x[held], y[held], chunk)
            if loss < least:
                least, best = loss, copy.deepcopy(model.state_dict())
    return {name: tensor for name, tensor in best.items() if not name.startswith("general")}


@torch.no_grad()
def validation_loss(model: nn.Module, x: Tensor, y: Tensor, chunk: int) -> float:
    parts = zip(x.split(chunk), y.split(chunk), strict=True)
    return sum(F.nll_loss(model(x_part), y_part, reduction="sum").item() for x_part, y_part in parts) / len(y)
