"""What the FedMix server makes of the q(z|s) that clients report (Reisser et al. 2021, Algorithm 2). K: all experts."""

import torch
from torch import Tensor

from fedmoe.algorithms.fedmix.states import FedMixConfig, ServerState
from fedmoe.core_types import ClientId

SERVER_PATIENCE = 0.9  # the server goes on sending an expert down to this share of the client's own floor


def has_reported(server: ServerState, client: ClientId) -> bool:
    return client < len(server.usage) and bool(server.usage[client].any())


def experts_sent(config: FedMixConfig, server: ServerState, client: ClientId) -> Tensor:
    """(K,) bool: all experts for a client that never reported; else those that its last q(z|s) uses."""
    if not has_reported(server, client):
        return torch.ones(config.num_experts, dtype=torch.bool)
    return server.usage[client] >= SERVER_PATIENCE * config.floor


def usage_rejection(usage_K: Tensor) -> str | None:
    """An update is weighted by its q(z|s), and a released gate pools features with it: it must be a distribution."""
    fair = bool((usage_K >= 0).all()) and abs(float(usage_K.sum()) - 1) < 1e-3
    return None if fair else f"its usage {[round(share, 4) for share in usage_K.tolist()]} is not a distribution"
