"""The error of everything that the user can put right."""


class UserError(Exception):
    """What was given cannot be used; the message is one line, and the exit code 2."""
