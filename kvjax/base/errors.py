"""The error for wrong input: the command line prints only its message, with exit code 2."""


class InputError(ValueError):
    """The error for input that kvjax cannot use, a ValueError.

    Args:
        message: what was given, what was expected, and what to do.

    >>> raise InputError("budget is 1.5, expected a fraction in (0, 1] or a whole number of slots")
    Traceback (most recent call last):
    kvjax.InputError: budget is 1.5, expected a fraction in (0, 1] or a whole number of slots
    """


# So tracebacks print kvjax.InputError, the name that users import.
InputError.__module__ = "kvjax"
