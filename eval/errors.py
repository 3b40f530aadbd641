"""The one exception for a user's mistake, and how an error is kept without what it holds."""


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong, where, and what is allowed.

    Command lines print it without a stack trace and exit with code 2; anything else that is raised is a bug.
    """


def without_frames(error: Exception) -> Exception:
    """The error alone: the frames of its traceback, and of what it followed, hold the values that they worked with."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
