"""A random generator whose results are given, to enumerate what it may draw."""

import numpy as np


class ScriptedRng(np.random.Generator):
    """Returns one permutation and one uniform number, whatever is asked for; means of beta distributions."""

    def __init__(self, order=(), uniform=0.0):
        super().__init__(np.random.PCG64(0))
        self.order, self.uniform = np.asarray(order, int), uniform

    def permutation(self, x):
        """Returns the given order."""
        assert len(self.order) == x
        return self.order

    def random(self, size=None):
        """Returns the given number."""
        return self.uniform if size is None else np.full(size, self.uniform)

    def beta(self, a, b):
        """Returns the mean of the distribution."""
        return a / (a + b)
