"""Non-linear objectives J = E_x[f(p(x))] and the weight w(p) = f'(p) that they give a prompt of pass rate p.

    name        f                 w                  c_j in f'(p) = sum_j c_j (1 - p)^j
    identity    p                 1                  1, 0, 0, ...
    log         log p             1 / p              1
    maxrl       log p             1 / p              1
    power       p^alpha           alpha p^(alpha-1)  alpha Gamma(j + 1 - alpha) / (Gamma(1 - alpha) j!)
    pass_at_k   1 - (1 - p)^k     k (1 - p)^(k-1)    k at j = k - 1, else 0

The weight comes from more draws, from scaled advantages, or from both: w = w_sample * w_grad. Sources: arXiv
2510.04996, section 2.2; maxrl: 2602.02710; pass_at_k: 2505.15201.
"""

import dataclasses

import numpy as np
from jaxtyping import Float

Numbers = Float[np.ndarray, "..."] | float
# Largest weight of a pass rate that draws are planned with, and the inverse of the least: quotients stay finite.
MAX_WEIGHT = 1e100


@dataclasses.dataclass(frozen=True)
class Objective:
    name: str  # "identity", "log", "maxrl", "power" or "pass_at_k"
    alpha: float = 0.5  # exponent of "power"
    k: int = 1  # number of draws of "pass_at_k"
    epsilon: float = 0.0  # least pass rate of `clipped_weight`; the other weights add it to the pass rate

    def weight(self, p: Numbers) -> Numbers:
        """Computes w(p) = f'(p)."""
        return weight(self.name, p, alpha=self.alpha, k=self.k)

    def clipped_weight(self, pass_rate: float) -> float:
        """Computes w at an observed pass rate, or at epsilon if it is lower."""
        return float(self.weight(max(float(pass_rate), self.epsilon)))

    def sample_weight(self, allocation: str, p: Numbers) -> Numbers:
        """Computes w_sample: under the strategy `estimate` the number of draws N_x is proportional to it.

        hybrid     sqrt(w(p + epsilon)): draws and advantages provide half each
        sampling   w(p + epsilon): draws provide everything
        variance   w(p + epsilon) sqrt((p + epsilon) (1 - p + epsilon)): least variance of the whole gradient for a
                   fixed budget, because N_x draws leave w(p)^2 p (1 - p) / N_x of it

        Source: arXiv 2510.04996 v3, section 3.1; `variance` is its appendix B.
        """
        p = np.asarray(p, np.float64)
        full = self.weight(p + self.epsilon)
        if allocation == "hybrid":
            return np.sqrt(full)
        if allocation == "sampling":
            return full
        return full * np.sqrt((p + self.epsilon) * (1.0 - p + self.epsilon))

    def gradient_weight(self, allocation: str, p: Numbers) -> Numbers:
        """Computes w_grad = w / w_sample: the part of the weight that advantages provide."""
        return self.weight(np.asarray(p, np.float64) + self.epsilon) / self.sample_weight(allocation, p)

    def check_weights(self, allocation: str) -> None:
        """Raises ValueError where floating point has no weight of a pass rate; the extremes are at 0 and 1."""
        ends = np.array([0.0, 1.0])
        with np.errstate(all="ignore"):
            weights = np.stack([self.sample_weight(allocation, ends), self.gradient_weight(allocation, ends)])
        if not ((1.0 / MAX_WEIGHT < weights) & (weights < MAX_WEIGHT)).all():
            raise ValueError(
                f"collection.objective_alpha is {self.alpha:g} and collection.objective_epsilon {self.epsilon:g} with "
                f"the objective {self.name}: some pass rate has a weight below {1 / MAX_WEIGHT:g} or above "
                f"{MAX_WEIGHT:g}. Lower objective_alpha, or raise objective_epsilon."
            )

    def series(self, length: int) -> Float[np.ndarray, " J"]:
        """Returns c_0, ..., c_{length - 1} of f'(p) = sum_j c_j (1 - p)^j."""
        c = np.zeros(length)
        if self.name in ("log", "maxrl"):
            c[:] = 1.0
        elif self.name == "power":
            j = np.arange(1, length)
            c[:] = self.alpha * np.concatenate([[1.0], np.cumprod((j - self.alpha) / j)])[:length]
        elif self.name == "pass_at_k":
            c[self.k - 1 : self.k] = self.k
        else:
            c[:1] = 1.0
        return c


def weight(objective: str, p: Numbers, *, alpha: float = 0.5, k: int = 1) -> Numbers:
    """Computes w(p) = f'(p).

    Args:
      objective: "identity", "log", "maxrl", "power" or "pass_at_k".
      p: pass rates, above 0 where f' has a pole there; not clipped here.
      alpha: exponent of "power".
      k: number of draws of "pass_at_k".

    Raises:
      ValueError: an unknown objective.
    """
    p = np.asarray(p, np.float64)
    if objective == "identity":
        return np.ones_like(p)
    if objective in ("log", "maxrl"):
        return 1.0 / p
    if objective == "power":
        return alpha * p ** (alpha - 1.0)
    if objective == "pass_at_k":
        return k * (1.0 - p) ** (k - 1)
    raise ValueError(f"objective is {objective!r}; it must be one of identity, log, maxrl, power, pass_at_k.")
