"""What can go wrong in the front door, with the HTTP status each is answered with."""


class AppError(Exception):
    """The root of this package's errors. ``status`` is its HTTP status."""

    status = 500


class SettingsError(AppError):
    """A setting is unknown or out of range; the message names it."""


class NotReadyError(AppError):
    """The models are still being loaded, or could not be."""

    status = 503


class LibraryUnusableError(AppError):
    """The library's file cannot be opened: damaged, or on a full or read-only disk."""


class NotAllowedError(AppError):
    """The request lacks the owner's token."""

    status = 401


class ServerFailedError(AppError):
    """A server this program started, or handed work to, did not do it."""
