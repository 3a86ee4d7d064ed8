"""What a client ends with: an ordinary `nn.Module` that maps x to probabilities, or to the numbers of a regression."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fedmoe import trees
from fedmoe.core_types import Tree
from fedmoe.models.task import CLASSIFICATION, Task


class PersonalModel(nn.Module):
    """All parts are buffers, so `state_dict`, `to` and saving work as for any module. Call it: ``model(x)``."""

    def __init__(
        self,
        predict: Callable[[Any, Any, Any, Tensor], Tensor],
        parts: dict[str, Tree | None],
        task: Task = CLASSIFICATION,
    ) -> None:
        super().__init__()
        self._task = task
        self._predict = predict
        self._kinds = {role: type(tree) for role, tree in parts.items() if tree is not None}
        for role, tree in parts.items():
            for name, tensor in ({} if tree is None else trees.to_named(tree)).items():
                self.register_buffer(_buffer(role, name), tensor.clone())
        self._names = {role: list(trees.to_named(tree)) if tree is not None else [] for role, tree in parts.items()}

    def forward(self, x: Tensor) -> Tensor:
        """(B, *input shape) -> (B, classes) probabilities, or (B, targets) numbers."""
        broadcast, client, personal = (self._part(role) for role in ("broadcast", "client", "personal"))
        return self._task.answer(self._predict(broadcast, client, personal, x))

    def _part(self, role: str) -> Tree | None:
        if role not in self._kinds:
            return None
        named = {name: self.get_buffer(_buffer(role, name)) for name in self._names[role]}
        return trees.from_named(self._kinds[role], named)


def _buffer(role: str, name: str) -> str:
    """A module's buffer names may hold no dot."""
    return f"{role}/{name}".replace(".", "|")
