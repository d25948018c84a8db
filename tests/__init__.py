"""The suite; its folders mirror the package. Helpers that several tests share import as `tests.<name>`."""

from beartype import beartype


def checked(function):
    """Checks a function's annotations at each call; conftest.py has jaxtyping put it around all of kvjax.

    Constructors are left alone: JAX rebuilds registered dataclasses through them with placeholders for leaves
    (`object()`, shapes, shardings), which no array annotation admits. The check is made when it is first called:
    most functions are not, in one process of tests.
    """
    if function.__name__ == "__init__":
        return function
    check = None

    def first(*args, **kwargs):
        nonlocal check
        check = check or beartype(function)
        return check(*args, **kwargs)

    return first
