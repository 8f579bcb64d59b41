"""The error of every checkpoint that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint is missing, malformed or unsupported; the message is one line."""
