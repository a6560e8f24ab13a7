"""Every error that a user can cause, as one small tree.

    CannQuantError            exit 1   work that was asked for could not be done
    ├── InputError            exit 2   the request or its input cannot be used; nothing was started
    │   ├── UsageError                 an option, a recipe or a combination of them
    │   │   └── RequestError           a field of a request for text; a server answers 400
    │   ├── CheckpointError            a model's files: missing, corrupt, contradictory, unsafe
    │   ├── UnsupportedError           a family, format or device that this version does not know
    │   ├── CorpusError                calibration or evaluation text
    │   └── ResumeError                an unfinished output that belongs to a different run
    ├── OverloadedError       exit 1   more requests than the engine lets wait; a server answers 429
    ├── NumericError          exit 1   NaN or infinity during calibration or solving
    ├── ThresholdError        exit 1   a measured result misses the threshold that the user set
    └── NonFiniteResultError  exit 3   NaN or infinity in an evaluation's result

A message says what is wrong, where (file, tensor, option) and what to do, in one line.
"""


class CannQuantError(Exception):
    """Base of all errors that a user can cause; `exit_code` is the process's exit status."""

    exit_code = 1


class InputError(CannQuantError):
    """The request or its input cannot be used."""

    exit_code = 2


class UsageError(InputError):
    """An option, a recipe or a combination of options is wrong."""


class RequestError(UsageError):
    """A request for text cannot be meant; `field` is the name of what is wrong in it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class CheckpointError(InputError):
    """A model's files are missing, corrupt, contradictory or unsafe."""


class UnsupportedError(InputError):
    """A model family, file format or device that this version does not know."""


class CorpusError(InputError):
    """Calibration or evaluation text cannot be used."""


class ResumeError(InputError):
    """An unfinished output belongs to a run with other settings, data or source."""


class OverloadedError(CannQuantError):
    """As many requests wait as are let wait; the same request may be sent again later."""


class NumericError(CannQuantError):
    """NaN or infinity appeared during calibration or solving."""


class ThresholdError(CannQuantError):
    """A measured result misses a threshold that the user set."""


class NonFiniteResultError(CannQuantError):
    """An evaluation produced NaN or infinity."""

    exit_code = 3
