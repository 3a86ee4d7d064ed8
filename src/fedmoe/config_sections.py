"""Sections of a config: who opts out, how clients train, when rounds end, who is scored, where a run computes."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from fedmoe.aggregation.server_optimizer import ServerOptimizer
from fedmoe.clients.sampling import AnchorSchedule, PoolSchedule
from fedmoe.errors import ConfigError
from fedmoe.evaluation.metric_catalog import require_known
from fedmoe.flower_settings import FlowerSettings
from fedmoe.models.task import RegressionLoss
from fedmoe.paths import FilePath
from fedmoe.setting_types import Float, Fraction, Int, NonNegativeInt, PositiveFloat, PositiveInt
from fedmoe.training.class_weights import ClassWeights
from fedmoe.training.settings import LocalTraining


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rule(Section):
    """Records whose `field` ("label" or a column of the data set) has one of these values are opted out."""

    field: str
    values: tuple[Int | str, ...]  # words are for tables


class OptOutConfig(Section):
    client_fraction: Fraction = 0.0
    clients: tuple[Int | str, ...] = ()  # numbers, or names where clients have them: npz files and tables
    record_fraction: Fraction = 0.0
    rules: tuple[Rule, ...] = ()
    masks: FilePath | None = None  # an .npz file: for each client id a bool array over its training rows, True is in


class TrainingConfig(Section):
    """How clients train: in the rounds, from a fresh start on their own, and when they personalise.

    `loss` is what all of them minimise; default: cross-entropy, or squared errors in a regression.
    """

    loss: Literal["cross_entropy"] | RegressionLoss | None = None
    huber_delta: PositiveFloat = 1.0  # where the Huber loss turns from squares to absolute values

    federated: LocalTraining = LocalTraining()
    local: LocalTraining = LocalTraining(epochs=100)
    personal: LocalTraining = LocalTraining(epochs=100, learning_rate=5e-4)
    # What an example of each class counts: by number, by name, or "balanced" over opted-in training rows.
    class_weights: ClassWeights | None = None

    @model_validator(mode="after")
    def _only_rounds_are_counted(self) -> "TrainingConfig":
        for stage in ("local", "personal"):
            if getattr(self, stage).rate_over_rounds is not None:
                raise ConfigError(
                    f"training.{stage}.rate_over_rounds is set, but this stage is no part of the rounds: its learning "
                    "rate can change over local steps. Set rate_over_steps instead."
                )
        return self


class ScheduleConfig(Section):
    rounds: PositiveInt = 50
    clients_per_round: PositiveInt | Literal["all"] = 5
    min_clients: PositiveInt = 1  # a round with fewer accepted updates is abandoned: the state stays as it was
    max_abandoned_rounds: PositiveInt = 10  # in a row; then the run stops with an error
    checkpoint_every: PositiveInt = 1
    # Rounds may end earlier: where the mean over clients on their validation data reaches every one of these targets,
    # or where its loss has not improved in so many validations. One takes place every `validate_every` rounds.
    stop_at: dict[str, Float] | None = None
    patience: PositiveInt | None = None
    validate_every: PositiveInt = 5
    release: bool = False  # let an algorithm collect the private parts that it declares for release
    max_update_norm: PositiveFloat | None = None  # an update that moved further is rejected
    max_examples: PositiveFloat = 1e7  # an update that claims more is rejected; algorithm.max_weight caps below it
    # For every algorithm that has such a setting and does not set it itself; none: each algorithm's own default.
    server_optimizer: ServerOptimizer | None = None
    pool: PoolSchedule | None = None  # who may be drawn when; default: everyone who opted in, always
    anchors: AnchorSchedule | None = None  # clients that are drawn apart, for every algorithm

    def may_end_after(self, round_number: int) -> bool:
        """Whether validation scores are looked at, and may end the rounds."""
        return (bool(self.stop_at) or self.patience is not None) and round_number % self.validate_every == 0


class EvaluationConfig(Section):
    clients: PositiveInt | None = None  # personalise and score this many, drawn by the seed; default: all
    clients_asked: Literal["all", "opted_in", "none"] = "all"  # who is asked for scores; they leave the client
    every: PositiveInt | None = None  # score the state of every so many rounds too, and of the last: a learning curve
    # Names of `evaluation.metric_catalog`, or import strings: name(log-probabilities (N, C), labels (N,)) -> a number.
    metrics: Annotated[tuple[str, ...], AfterValidator(require_known)] = ()
    priors: bool = False  # score every algorithm under own, balanced and estimated label frequencies as well
    pooled: PositiveInt | None = None  # score a new client without data on so many of everyone's validation examples

    @model_validator(mode="after")
    def _a_curve_needs_scores(self) -> "EvaluationConfig":
        if self.every and self.clients_asked == "none":
            raise ConfigError(
                f"evaluation.every={self.every} asks clients for scores on the way, but evaluation.clients_asked is "
                "'none'. Leave evaluation.every away, or ask 'opted_in' or 'all' clients."
            )
        return self


class EngineConfig(Section):
    name: Literal["embedded", "ray", "flower"] = "embedded"
    workers: PositiveInt | None = None  # default: one per core
    backend: Literal["auto", "native", "batched", "sequential"] = "auto"
    # Where the batched backend computes, in one process; "auto": cuda or mps where PyTorch finds one and nothing else
    # here needs the CPU.
    device: Literal["cpu", "cuda", "mps", "auto"] = "cpu"
    cohort_size: PositiveInt | None = None  # clients trained together: 1 sequential, 16 batched
    retries: NonNegativeInt = 2  # times that a cohort is run again because its worker was lost
    address: str | None = None  # of a Ray cluster, such as "10.0.0.1:6379" or "auto"; default: a Ray of this machine
    flower: FlowerSettings = FlowerSettings()

    @property
    def one_client_per_message(self) -> bool:
        """A message to a node is for its one client: nothing is trained together."""
        return self.name == "flower"

    @property
    def on_silos(self) -> bool:
        """Whether the clients' records are on machines of their own: then the config declares how many there are."""
        return self.name == "flower" and self.flower.num_clients is not None
