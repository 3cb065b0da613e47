"""Tells errors that are new from those that were raised before."""

from __future__ import annotations


def is_raised_already(failure: BaseException, error: BaseException | None) -> bool:
    """Whether ``error``, with which a block ends, is the one of which ``failure``, raised by closing, only tells again.

    A writer raises its first error as it was, and later ones that have the first as their cause.
    """
    return error is not None and failure.__cause__ is not None and failure.__cause__ in (error, error.__cause__)
