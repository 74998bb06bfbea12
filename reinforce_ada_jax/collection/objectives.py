"""Non-linear objectives J = E_x[f(p(x))] and the weight w(p) = f'(p) that they give a prompt of pass rate p.

    identity   f = p          w = 1
    log        f = log p      w = 1 / p
    power      f = p^alpha    w = alpha p^(alpha - 1)

The weight is paid by more draws, by scaled advantages, or by both: w = w_sample * w_grad.
Source: arXiv 2510.04996, section 3.2 and appendix.
"""

import numpy as np
from jaxtyping import Float

Numbers = Float[np.ndarray, "..."] | float


def weight(objective: str, p: Numbers, *, alpha: float = 0.5) -> Numbers:
    """Computes w(p) = f'(p).

    Args:
      objective: "identity", "log" or "power".
      p: pass rates, above 0 where f' has a pole there; not clipped here.
      alpha: exponent of "power".

    Raises:
      ValueError: an unknown objective.
    """
    p = np.asarray(p, np.float64)
    if objective == "identity":
        return np.ones_like(p)
    if objective == "log":
        return 1.0 / p
    if objective == "power":
        return alpha * p ** (alpha - 1.0)
    raise ValueError(f"objective is {objective!r}; it must be one of identity, log, power.")


def sample_weight(allocation: str, objective: str, p: Numbers, *, alpha: float = 0.5, epsilon: float = 0.0) -> Numbers:
    """Computes w_sample, which the number of draws N_x is proportional to under the strategy `estimate`.

    hybrid     sqrt(w(p + epsilon)): draws and advantages pay half each
    sampling   w(p + epsilon): draws pay everything
    variance   sqrt((1 - p + epsilon) / (p + epsilon)): least variance for a fixed budget, under the log objective

    Raises:
      ValueError: an unknown allocation.
    """
    p = np.asarray(p, np.float64)
    if allocation == "hybrid":
        return np.sqrt(weight(objective, p + epsilon, alpha=alpha))
    if allocation == "sampling":
        return weight(objective, p + epsilon, alpha=alpha)
    if allocation == "variance":
        return np.sqrt((1.0 - p + epsilon) / (p + epsilon))
    raise ValueError(f"allocation is {allocation!r}; it must be one of hybrid, sampling, variance.")


def gradient_weight(
    allocation: str, objective: str, p: Numbers, *, alpha: float = 0.5, epsilon: float = 0.0
) -> Numbers:
    """Computes w_grad = w / w_sample: the factor of advantages that draws did not pay."""
    full = weight(objective, np.asarray(p, np.float64) + epsilon, alpha=alpha)
    return full / sample_weight(allocation, objective, p, alpha=alpha, epsilon=epsilon)
