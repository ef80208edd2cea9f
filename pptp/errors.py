"""The one exception whose text is meant for the user: what was wrong, and what to do."""


class UserError(ValueError):
    """Bad input, said in one sentence; the command line prints it without a traceback."""
