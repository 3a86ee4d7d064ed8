"""Any algorithm whose shared model answers alike for everybody, then a calibration that its clients fit together.

Shape suffixes: S clients of a cohort, N examples, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmoe.algorithms.algorithm import Algorithm, Exchange, NoReport
from fedmoe.algorithms.label_priors import calibration as fitting
from fedmoe.algorithms.label_priors.calibration import Calibration, CalibrationConfig, Fit, Slope
from fedmoe.algorithms.label_priors.frequencies import training_offset
from fedmoe.algorithms.label_priors.remembered import CalibrationRows, RememberedRows
from fedmoe.algorithms.setup import AlgorithmSetup
from fedmoe.core_types import ClientData, ClientId, Examples, Tree
from fedmoe.streams import Streams
from fedmoe.trees import record_type
from fedmoe.wire import message

Scores = Callable[[Tree, Tree, Examples], Tensor]  # (broadcasts, client states, examples) -> (S, N, C)


def with_calibration(
    algorithm: Algorithm, config: CalibrationConfig, setup: AlgorithmSetup, scores: Scores, max_weight: float | None
) -> Algorithm:
    """The server's state and the last broadcast get a second part beside `shared`, the algorithm's own.

    `predict`, `personalize` and whatever else reads the last broadcast is the caller's to adapt.
    """
    delivered_type = algorithm.delivery[-1].broadcast_type
    server_type = record_type("CalibratedServer", {"shared": algorithm.server_type, "fit": Fit})
    sent_type = message(record_type("Calibrated", {"shared": delivered_type, "calibration": Calibration}))

    remembered = RememberedRows()

    def rows_of(number: int, sent: Any, client: Tree, data: ClientData, rng: Streams) -> CalibrationRows:
        def compute() -> CalibrationRows:
            return calibration_rows(setup, scores, sent.shared, client, data)

        return remembered(rng.clients, (sent.shared, client), compute, anew=number == 1)

    def deliver(server: Any, client: ClientId, updates: Sequence[Any]) -> Any:
        return sent_type(algorithm.delivery[-1].broadcast(server.shared, client, updates), server.fit.at)

    def init_client(broadcast: Any, client: ClientId, seed: int) -> Any:
        inner = broadcast.shared if isinstance(broadcast, sent_type) else broadcast
        return algorithm.init_client(inner, client, seed)

    def ask(number: int) -> Exchange:
        def broadcast(server: Any, client: ClientId, updates: Sequence[Any]) -> Any:
            at = fitting.looking_ahead(server.fit) if number > 1 else fitting.identity(setup.num_classes)
            return sent_type(algorithm.delivery[-1].broadcast(server.shared, client, updates), at)

        def aggregate(server: Any, slopes: Mapping[ClientId, Slope], *_: Any) -> Any:
            fit = server.fit if number > 1 else fitting.start(setup.num_classes)
            return server._replace(fit=fitting.step(fit, slopes, config.ridge, max_weight))

        return Exchange(
            name=f"calibrate {number}",
            broadcast=broadcast,
            local_update=lambda b, c, data, rng: (
                c,
                slopes(config.clip, rows_of(number, b, c, data, rng), b),
                NoReport(),
            ),
            aggregate=aggregate,
            update_like=lambda _b: Slope(torch.zeros(()), torch.zeros(setup.num_classes), torch.zeros(())),
            broadcast_type=sent_type,
            update_type=Slope,
            rejection=lambda slope, _b: fitting.rejection(slope, config.clip),
        )

    validation = algorithm.validation
    return algorithm._replace(
        server_type=server_type,
        init_server=lambda seed: server_type(algorithm.init_server(seed), fitting.start(setup.num_classes)),
        round=tuple(map(_on_shared, algorithm.round)),
        validation=validation and validation._replace(exchange=_on_shared(validation.exchange)),
        after_rounds=tuple(ask(number) for number in range(1, config.exchanges + 1)),
        rounds_field="shared",
        delivery=(
            *map(_on_shared, algorithm.delivery[:-1]),
            _on_shared(algorithm.delivery[-1])._replace(broadcast=deliver, broadcast_type=sent_type),
        ),
        sample=lambda server, *rest: algorithm.sample(server.shared, *rest),
        init_client=init_client,
    )


def calibration_rows(
    setup: AlgorithmSetup, scores: Scores, shared: Tree, client: Tree, data: ClientData
) -> CalibrationRows:
    """The opted-in validation rows, and the frequencies of the opted-in training rows."""
    scores_SNC = scores(shared, client, data.validation)
    offset_SC = training_offset(data.train, setup.num_classes)
    labels = data.validation._replace(x=scores_SNC[..., :0], extra={})  # what was read of the inputs are the scores
    return CalibrationRows(scores_SNC, offset_SC, labels)


def slopes(clip: float, rows: CalibrationRows, sent: Any) -> Slope:
    return fitting.slopes(rows.scores_SNC, rows.offset_SC, rows.labels, sent.calibration, clip)


def _on_shared(exchange: Exchange) -> Exchange:
    """The same exchange where the server's state has a part beside its own."""
    observe = exchange.observe
    return exchange._replace(
        broadcast=lambda server, *rest: exchange.broadcast(server.shared, *rest),
        aggregate=lambda server, *rest: server._replace(shared=exchange.aggregate(server.shared, *rest)),
        observe=observe and (lambda before, after, *rest: observe(before.shared, after.shared, *rest)),
    )
