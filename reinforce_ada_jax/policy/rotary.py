"""Rotary positions: frequencies, how they are stretched for longer contexts, and the rotation of queries and keys."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Numbers of `rope_scaling` or `rope_parameters` in a config.json.
NUMBERS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_slow",
    "beta_fast", "attention_factor", "partial_rotary_factor",
)  # fmt: skip
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
ALIASES = {"su": "longrope"}  # the name in the first folders of Phi-3


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of the slow rotary frequencies (`rope_type` of a config.json).

    A frequency that turns more than `high_frequency_factor` times over `original_positions` stays, and one that turns
    less than `low_frequency_factor` times is divided by `factor`. Between the two it is interpolated: with "llama3"
    linearly in its turns, with "yarn" (arXiv 2309.00071, sections 3.2 and 3.4) linearly in its index. With "linear" all
    are divided. With "longrope" (2402.13753) each is divided by its own number of `short_factors`, or of `long_factors`
    if `is_long`. A run whose texts may be longer than `original_positions` uses the long factors for all its texts.
    """

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_positions: int = 1
    kind: str = "llama3"
    attention_factor: float = 1.0  # multiplies rotated queries and rotated keys
    truncates: bool = True  # "yarn" interpolates between whole-numbered indices
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False


def from_config(parameters: dict[str, Any], theta: float, rotary_dim: int = 0) -> RopeScaling | None:
    """Returns the scaling of `rope_parameters` or `rope_scaling` in a config.json; None: nothing is stretched.

    For "longrope" `parameters` have `max_position_embeddings` too, and `rotary_dim` counts the numbers of a head that
    are rotated; with 0 it is refused.

    Raises ValueError if they are incomplete, or of a kind that is not computed here.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in NEEDED or (kind == "longrope" and not rotary_dim):
        raise ValueError(
            f"config.json asks for rotary scaling {kind!r:.80}; supported are the default, {', '.join(NEEDED)}. Remove "
            "rope_scaling if the model is to be used within its original length."
        )
    missing = [key for key in NEEDED[kind] if parameters.get(key) is None]
    if missing:
        raise ValueError(f"config.json asks for rotary scaling {kind!r} but lacks {', '.join(missing)}.")
    if kind == "longrope":
        return _longrope(parameters, rotary_dim)
    factor = float(parameters["factor"])
    if kind == "linear":
        return RopeScaling(factor, kind=kind)
    original = int(parameters["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        return RopeScaling(factor, low, high, original)
    unknown = [key for key in ("mscale", "mscale_all_dim") if parameters.get(key) is not None]
    if unknown or theta <= 1:
        raise ValueError(
            f"config.json asks for rotary scaling 'yarn' with {', '.join(unknown) or f'rope_theta = {theta:g}'}, which "
            "no released model of these families uses."
        )
    own = _yarn_defaults(factor) | {key: parameters[key] for key in _yarn_defaults(1.0) if parameters.get(key)}
    return RopeScaling(
        factor, float(own["beta_slow"]), float(own["beta_fast"]), original, kind, float(own["attention_factor"]),
        truncates=parameters.get("truncate") is not False,
    )  # fmt: skip


def _longrope(parameters: dict[str, Any], rotary_dim: int) -> RopeScaling:
    factors = []
    for name in ("short_factor", "long_factor"):
        given = parameters[name]
        if not isinstance(given, list) or len(given) != rotary_dim // 2 or not all(map(_is_number, given)):
            raise ValueError(
                f"config.json has {name} = {given!r:.80}; it must be {rotary_dim // 2} numbers above 0, one for each "
                "frequency."
            )
        factors.append(tuple(map(float, given)))
    original = int(parameters["original_max_position_embeddings"])
    if original < 1:
        raise ValueError(f"config.json has original_max_position_embeddings = {original}; it must be at least 1.")
    factor = float(parameters.get("factor") or parameters["max_position_embeddings"] / original)
    own = parameters.get("attention_factor") or _longrope_default(factor, original)
    return RopeScaling(
        factor, original_positions=original, kind="longrope", attention_factor=float(own), short_factors=factors[0],
        long_factors=factors[1],
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 2**53


def _longrope_default(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_defaults(factor: float) -> dict[str, float]:
    return {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": 0.1 * math.log(max(factor, 1.0)) + 1.0}


def to_config(scaling: RopeScaling | None, max_positions: int) -> dict[str, Any]:
    """Returns `rope_scaling` of a config.json, from which `from_config` makes `scaling` again."""
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    original = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_positions}
    if scaling.kind == "longrope":
        default = _longrope_default(scaling.factor, scaling.original_positions)
        own = {} if scaling.attention_factor == default else {"attention_factor": scaling.attention_factor}
        if scaling.factor == max_positions / scaling.original_positions:
            del original["factor"]
        lists = {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        return {"rope_type": "longrope", **lists, **original, **own}
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if scaling.kind == "llama3":
        return {"rope_type": "llama3", **original, "low_freq_factor": low, "high_freq_factor": high}
    own = {"beta_slow": low, "beta_fast": high, "attention_factor": scaling.attention_factor}
    defaults = _yarn_defaults(scaling.factor)
    own = {key: own[key] for key in own if own[key] != defaults[key]}
    return {"rope_type": "yarn", **original, **own, **({} if scaling.truncates else {"truncate": False})}


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Float[Array, " half"]:
    """Returns inverse frequencies theta^(-2i/H), stretched by `scaling`; H numbers of a head are rotated."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    if head_dim & (head_dim - 1):  # not a power of two: XLA multiplies by 1/H, which rounds once more
        exponents = jnp.asarray(np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    inverse = 1.0 / theta**exponents
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "longrope":
        return inverse / jnp.asarray(scaling.long_factors if scaling.is_long else scaling.short_factors, jnp.float32)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if scaling.kind == "llama3":
        share = (scaling.original_positions / (2 * jnp.pi / inverse) - low) / (high - low)
    else:

        def index(turns: float) -> float:
            """Returns the fractional index of the frequency with this number of turns."""
            return head_dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = index(high), index(low)
        if scaling.truncates:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        share = 1 - (jnp.arange(head_dim // 2, dtype=jnp.float32) - first) / (last - first if last != first else 0.001)
    share = jnp.clip(share, 0.0, 1.0)
    return (1 - share) * inverse / scaling.factor + share * inverse


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array | np.ndarray, "B T"],
    frequencies: Float[Array, " half"],
    factor: float | Float[Array, ""] = 1.0,
) -> Float[Array, "B T N H"]:
    """Applies the rotary position embedding in Hugging Face's layout, where dimension i turns with dimension i + H/2.

    The result is multiplied by `factor`. With fewer than H/2 frequencies only the first numbers of a head are rotated.
    """
    if (rotated := 2 * frequencies.shape[0]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :rotated], positions, frequencies, factor), x[..., rotated:]], axis=-1)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if not isinstance(factor, float) or factor != 1.0:
        cos, sin = cos * factor, sin * factor
    cos, sin = cos[:, :, None, :].astype(x.dtype), sin[:, :, None, :].astype(x.dtype)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
