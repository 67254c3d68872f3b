"""Every error Headrace raises on purpose. The class says whose move it is.

HeadraceError
├── CallerError                the caller must change the request; retrying as it is cannot help
│   ├── InvalidRequest         INVALID_ARGUMENT      names the field
│   ├── AlreadyExists          ALREADY_EXISTS        this request id is running
│   └── NotFound               NOT_FOUND             no such reservation, request or key
├── RetryLater                 the same call may succeed later, or elsewhere
│   ├── Overloaded             RESOURCE_EXHAUSTED    a bounded queue or pool is full; carries a retry hint
│   ├── Unavailable            UNAVAILABLE           draining, starting, or no worker of that kind
│   ├── StaleEpoch             FAILED_PRECONDITION   addressed to an earlier life of this process
│   └── StaleAttempt           ABORTED               an older attempt, or one whose reservation has ended
├── DeadlineExceeded           DEADLINE_EXCEEDED     the one deadline of the request has passed
├── Cancelled                  CANCELLED             the caller left
├── TransferError              UNAVAILABLE           KV bytes could not be moved; a new attempt may
├── ManifestMismatch           DATA_LOSS             what arrived is not what was pushed; a new attempt may
└── OurFault                   the operator must act; retrying cannot help
    ├── ConfigError            INVALID_ARGUMENT      a setting, named by its path
    ├── CheckpointError        FAILED_PRECONDITION   a model directory we cannot serve, and why
    ├── LayoutMismatch         FAILED_PRECONDITION   two workers whose KV layouts differ were paired
    ├── IncompatiblePeer       FAILED_PRECONDITION   two processes that do not speak the same protocol
    └── InternalError          INTERNAL              a broken promise of our own
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base. `reason` is UPPER_SNAKE and travels as `headrace-reason`; `field` names the offending request field.

    `retryable`: whether a new attempt may succeed; an instance may differ from its class.
    """

    reason = "UNKNOWN"
    retryable = False

    def __init__(
        self,
        message: str = "",
        *,
        reason: str | None = None,
        field: str = "",
        retry_after_s: float = 0.0,
        retryable: bool | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.field = field
        self.retry_after_s = retry_after_s
        if retryable is not None:
            self.retryable = retryable


class CallerError(HeadraceError):
    """The caller must change the request."""


class InvalidRequest(CallerError):
    """A field is missing, malformed or out of range. `field` names it."""

    reason = "INVALID_REQUEST"


class AlreadyExists(CallerError):
    """The client-chosen request id belongs to a request that is still running."""

    reason = "REQUEST_EXISTS"


class NotFound(CallerError):
    """Nothing of that name here (any more)."""

    reason = "NOT_FOUND"


class RetryLater(HeadraceError):
    """The same call may succeed later or on another worker."""

    retryable = True


class Overloaded(RetryLater):
    """A bounded queue or pool is full. `retry_after_s` is a hint in seconds."""

    reason = "OVERLOADED"


class Unavailable(RetryLater):
    """Starting, draining, unreachable, or no worker of the wanted kind."""

    reason = "UNAVAILABLE"


class StaleEpoch(RetryLater):
    """The message was addressed to an earlier process at this address."""

    reason = "STALE_EPOCH"


class StaleAttempt(RetryLater):
    """The attempt this message belongs to has been superseded, cancelled or has expired."""

    reason = "STALE_ATTEMPT"


class DeadlineExceeded(HeadraceError):
    """The request's one deadline has passed."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(HeadraceError):
    """The caller left; nobody waits for the answer."""

    reason = "CANCELLED"


class TransferError(HeadraceError):
    """KV bytes could not be moved. The attempt is lost, the request is not."""

    reason = "TRANSFER_FAILED"
    retryable = True


class ManifestMismatch(HeadraceError):
    """Rows that arrived differ in count or checksum from rows that were pushed."""

    reason = "MANIFEST_MISMATCH"
    retryable = True


class OurFault(HeadraceError):
    """The operator must act."""


class ConfigError(OurFault):
    """A setting is unknown, out of range, or cannot work beside another. `field` is its path."""

    reason = "CONFIG"


class CheckpointError(OurFault):
    """A model directory that cannot be served; the message says every reason found."""

    reason = "CHECKPOINT"


class LayoutMismatch(OurFault):
    """Two workers whose KV layouts differ were paired."""

    reason = "LAYOUT_MISMATCH"


class IncompatiblePeer(OurFault):
    """Two processes of different protocol versions, or of settings that cannot work together."""

    reason = "INCOMPATIBLE_PEER"


class InternalError(OurFault):
    """A promise of our own was broken."""

    reason = "INTERNAL"


def unwrap(error: BaseException) -> BaseException:
    """The first typed error inside an exception group, else the first leaf, else the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [unwrap(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, HeadraceError)), leaves[0])
