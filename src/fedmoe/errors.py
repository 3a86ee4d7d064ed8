"""Errors that a user can fix: each says what is wrong, which value, why, and what to do.

The command line prints them without a traceback and exits with 2; anything else is a defect of ours.
"""


class FedmoeError(Exception):
    """Base of every error that is explained to the user rather than traced."""


class ConfigError(FedmoeError):
    """A setting that cannot work."""


class DataError(FedmoeError):
    """A file or tensor that is not what it should be."""


class MessageError(FedmoeError):
    """A broadcast, update or report that may not be sent or accepted."""


class RunError(FedmoeError):
    """A run directory, checkpoint or worker that cannot go on."""


class Stopped(RunError):  # noqa: N818 (it is no error that a user stops a run)
    """The user asked the run to stop; it can be resumed."""
