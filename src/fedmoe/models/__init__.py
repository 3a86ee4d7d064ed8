"""Networks, and what helps to bring one's own: `to_group_norm`, `split_mask`."""

from fedmoe.models.own_modules import split_mask, to_group_norm

__all__ = ["split_mask", "to_group_norm"]
