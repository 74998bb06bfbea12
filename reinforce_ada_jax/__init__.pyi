"""The public API for type checkers; __init__.py imports these names on first use."""

from reinforce_ada_jax import config as config
from reinforce_ada_jax import train as train
from reinforce_ada_jax.collection.advantages import Group as Group
from reinforce_ada_jax.collection.advantages import anchored_advantages as anchored_advantages
from reinforce_ada_jax.collection.advantages import group_advantages as group_advantages
from reinforce_ada_jax.collection.advantages import leave_one_out_advantages as leave_one_out_advantages
from reinforce_ada_jax.collection.advantages import make_group as make_group
from reinforce_ada_jax.collection.collect import CollectOptions as CollectOptions
from reinforce_ada_jax.collection.collect import collect as collect
from reinforce_ada_jax.collection.groups import balanced_group as balanced_group
from reinforce_ada_jax.collection.objectives import weight as objective_weight
from reinforce_ada_jax.collection.strategies import Strategy as Strategy
from reinforce_ada_jax.collection.strategies import build as build_strategy
from reinforce_ada_jax.config import Config as Config
from reinforce_ada_jax.config import defaults as defaults
from reinforce_ada_jax.config import validate as validate
from reinforce_ada_jax.learning.loss import LossConfig as LossConfig
from reinforce_ada_jax.learning.loss import clipped_policy_loss as clipped_policy_loss
from reinforce_ada_jax.learning.loss import kl_estimate as kl_estimate
from reinforce_ada_jax.policy.huggingface import load as load
from reinforce_ada_jax.policy.huggingface import save as save
from reinforce_ada_jax.policy.transformer import logits as logits
from reinforce_ada_jax.rewards.gsm8k import grade as grade_gsm8k
from reinforce_ada_jax.rewards.math_answer import grade as grade_math
from reinforce_ada_jax.rewards.minerva import grade as grade_minerva
from reinforce_ada_jax.rewards.workers import VerifierPool as VerifierPool
from reinforce_ada_jax.sampling.engine import Engine as Engine
from reinforce_ada_jax.sampling.rollouts import Rollouts as Rollouts
from reinforce_ada_jax.sampling.state import EngineOptions as EngineOptions
from reinforce_ada_jax.sampling.state import SamplingParams as SamplingParams
from reinforce_ada_jax.types import Pool as Pool
from reinforce_ada_jax.types import Prompt as Prompt
from reinforce_ada_jax.types import Request as Request
from reinforce_ada_jax.types import RequestQueue as RequestQueue
from reinforce_ada_jax.types import Response as Response
from reinforce_ada_jax.types import Verdict as Verdict

__version__: str
