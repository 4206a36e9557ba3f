"""What tests draw from random, numpy and torch follows the run's seed and the test, and nothing else.

Without it a test draws what the tests before it left over, so that its inputs depend on the order and on the
worker it happens to run on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from tests import counts


def seed_for(name: str) -> int:
    """Return the seed of a test, a fixture or a module: 32 bits from the run's seed and its name."""
    return zlib.crc32(f"{counts.seed()} {name}".encode())


def seed_everything(name: str) -> None:
    """Seed random, numpy and torch for what is called `name`."""
    import numpy as np
    import torch

    seed = seed_for(name)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def drawing_apart(name: str) -> Iterator[None]:
    """Seed everything for `name`, and put the generators back afterwards.

    For fixtures that several tests share: whichever test comes first sets one up, and must not draw other
    numbers for it.
    """
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_everything(name)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
