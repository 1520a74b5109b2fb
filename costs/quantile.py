"""A quantile that is followed as values come."""


def followed(level: float, beyond: float, pace: float, *, larger: bool) -> float:
    """The level that a part of `beyond` of all values exceed, after one more that is `larger` or not, by stochastic
    approximation (Robbins and Monro 1951): a value moves it by a constant, however large it is.
    """
    return level + pace * (1.0 - beyond if larger else -beyond)
