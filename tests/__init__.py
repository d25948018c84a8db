"""The suite; its folders mirror the package. Helpers that several tests share import as `tests.<name>`."""

from beartype import beartype


def checked(function):
    """Checks a function's annotations at each call; conftest.py has jaxtyping put it around all of kvjax.

    Constructors are left alone: JAX rebuilds registered dataclasses through them with placeholders for leaves
    (`object()`, shapes, shardings), which no array annotation admits. The check is made at the first
    call, because one process of tests calls few of the functions.
    """
    if function.__name__ == "__init__":
        return function
    check = None

    def first(*args, **kwargs):
        nonlocal check
        check = check or beartype(function)
        return check(*args, **kwargs)

    return first
