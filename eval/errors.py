"""The one exception for a user's mistake."""


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong, where, and what is allowed.

    Command lines print it without a stack trace and exit with code 2; anything else that is raised is a bug.
    """
