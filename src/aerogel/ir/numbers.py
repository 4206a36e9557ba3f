"""Whole numbers, by the names everyone knows them by."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The least multiple of b that is at least a."""
    return -(-a // b) * b
