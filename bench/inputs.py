"""The configurations, models and workloads that the flags name."""

import pathlib

import jax
import jax.numpy as jnp
from absl import flags

from bench import models, workloads
from bench.workloads import Lengths
from reinforce_ada_jax import config as config_lib
from reinforce_ada_jax.config import Config
from reinforce_ada_jax.policy import huggingface, transformer
from reinforce_ada_jax.policy.architecture import Architecture, from_hf
from reinforce_ada_jax.policy.presets import PUBLISHED
from reinforce_ada_jax.policy.transformer import Params

# Settings of runs that are measured: nothing is reported elsewhere.
QUIET = {"logging.trackers": ""}
# Standard deviation of random biases, and of random scales of norms around 1.
CHANGE = 0.1


def config_of(options: flags.FlagValues) -> Config:
    """Returns the configuration --config.

    Raises:
      ValueError: there is none, or it breaks a rule.
    """
    if options.config is None:
        raise ValueError("--config is missing: a configuration of train, such as configs/tiny.py.")
    return config_lib.resolve(options.config)


def architecture_of(options: flags.FlagValues) -> Architecture:
    """Returns the architecture that --shape or --model names.

    Raises:
      ValueError: there is none.
    """
    if options.shape:
        return models.shaped(options.shape)
    if options.model is None:
        raise ValueError("--model is missing: a Hugging Face folder, or with --shape one to be made.")
    if options.model in PUBLISHED:
        return from_hf(PUBLISHED[options.model])
    return huggingface.read_config(options.model)


def random_weights(options: flags.FlagValues, architecture: Architecture, dtype: str) -> Params:
    """Returns weights made from --seed.

    Biases and scales of norms are random, too. With zeros and ones no comparison sees a program without them.
    """
    key = jax.random.key(options.seed)
    weights = transformer.flatten(transformer.init(architecture, key, dtype=jnp.dtype(dtype)))
    constant = [name for name, x in weights.items() if (x == x.ravel()[0]).all()]
    for name, own in zip(constant, jax.random.split(jax.random.fold_in(key, 1), len(constant)), strict=True):
        weights[name] += CHANGE * jax.random.normal(own, weights[name].shape, weights[name].dtype)
    return transformer.nest(weights)


def model_folder(options: flags.FlagValues, architecture: Architecture) -> pathlib.Path | None:
    """Returns the folder --model if it has weights; with --shape it is made first, so that baselines can read it.

    Raises:
      ValueError: --shape without a folder, or the folder holds another model.
    """
    if options.model is None:
        raise ValueError("--shape needs --model=FOLDER, where the model is put.")
    folder = pathlib.Path(options.model)
    if options.shape and not folder.exists():
        huggingface.save(folder, architecture, random_weights(options, architecture, "float32"))
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    if huggingface.read_config(folder) != architecture:
        raise ValueError(f"{folder} holds another model than --shape={options.shape}: name another folder.")
    return folder


def response_lengths(options: flags.FlagValues, default: int) -> Lengths:
    """Returns the lengths that --lengths or --response_tokens gives."""
    if options.lengths:
        return workloads.parse_lengths(options.lengths)
    return workloads.constant(options.response_tokens or default)
