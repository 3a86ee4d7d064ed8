"""The section [engine.flower]: what the server of real silos knows of them, and how long it waits."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from fedmoe.setting_types import NonNegativeInt, PositiveFloat, PositiveInt


class FlowerSettings(BaseModel):
    """A server holds no data: how many clients there are and what their examples look like is declared here.

    Nobody waits for ever: after `deadline` an exchange goes on with the replies that are there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_clients: PositiveInt | None = None  # nodes have the numbers 0 … num_clients - 1 (their partition-id)
    num_classes: NonNegativeInt | None = None
    input_shape: tuple[PositiveInt, ...] = ()  # of one example
    input_type: Literal["float32", "int64"] = "float32"
    vocabulary_size: PositiveInt | None = None  # of texts: how many ids there are, padding (0) included
    deadline: PositiveFloat = 3600.0  # seconds for one exchange, from its first message to its last reply
    join_seconds: PositiveFloat = 300.0  # that the server waits at its start for everybody's node
