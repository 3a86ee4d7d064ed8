"""The section [privacy] of a config: what clients send is trained by DP-SGD, with a budget."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from fedmoe.errors import ConfigError
from fedmoe.noise import NoiseSource
from fedmoe.private_steps import Clipping
from fedmoe.setting_types import Float, PositiveFloat, PositiveInt


class PrivacyConfig(BaseModel):
    """All numbers are public: they may not depend on what a client holds.

    `sampling_rate` is L / N of Abadi et al. for clients of about N records, `expected_batch_size` their L. Either the
    noise is given, or the epsilon that it is solved for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    sampling_rate: Float
    expected_batch_size: PositiveFloat | None = None  # default: training.federated.batch_size
    noise_multiplier: Float | None = None  # sigma, relative to the sensitivity; 0: no noise and no guarantee
    target_epsilon: Float | None = None  # of a client that takes part in all rounds
    delta: Float = 1e-5
    clip_norm: PositiveFloat = 1.0
    clipping: Clipping = "whole"
    stop_at_epsilon: Float | None = None  # a client takes part no more when a further round would go beyond
    noise_source: NoiseSource = "secure"
    microbatch_size: PositiveInt = 64  # examples whose gradients are held at a time

    @model_validator(mode="after")
    def _makes_sense(self) -> "PrivacyConfig":
        if not 0 < self.sampling_rate <= 1:
            raise ConfigError(
                f"privacy.sampling_rate={self.sampling_rate:g} is no probability of a record to be in a batch. "
                "Set it above 0 and up to 1."
            )
        if not 0 < self.delta < 1:
            raise ConfigError(f"privacy.delta={self.delta:g} is no probability. Set it far below 1 / N, such as 1e-5.")
        for name in ("target_epsilon", "stop_at_epsilon"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"privacy.{name}={value:g}: no noise gives an epsilon of 0. Set it above 0.")
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ConfigError(
                "the section [privacy] needs one of noise_multiplier and target_epsilon: how much noise there is, or "
                "the epsilon that it is solved for."
            )
        if self.noise_multiplier is not None and not self.noise_multiplier >= 0:
            raise ConfigError(f"privacy.noise_multiplier={self.noise_multiplier:g} is negative. Set it to 0 or above.")
        return self

    def require_small_delta(self, expected_batch_size: float) -> None:
        """With delta at 1 / N a mechanism may publish a whole record and be called private."""
        records = expected_batch_size / self.sampling_rate
        if self.delta >= 1 / records:
            raise ConfigError(
                f"privacy.delta={self.delta:g} is not below 1 / N for the N = {records:g} records of a client that "
                "sampling_rate and expected_batch_size speak of. Lower it."
            )

    def facts(self) -> dict[str, Any]:
        return {"delta": self.delta, "noise_source": self.noise_source, "clipping": self.clipping}
