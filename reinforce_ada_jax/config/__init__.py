"""Every setting of a run: its default and meaning (settings), allowed values, rules, and what a resume may change."""

from reinforce_ada_jax.config.config_files import packaged
from reinforce_ada_jax.config.defaults import (
    changed,
    defaults,
    flatten,
    from_json,
    replaced,
    resolve,
    settings,
    to_json,
    with_tuples,
)
from reinforce_ada_jax.config.resume import (
    DRAWN_WITH,
    GRADED_BY,
    check_evaluated,
    check_workdir,
    read,
    with_saved_dtype,
)
from reinforce_ada_jax.config.rules import (
    begun_tokens,
    check,
    check_strategy,
    least_pages,
    longest_prompt,
    longest_response,
    longest_turn,
    validate,
)
from reinforce_ada_jax.config.settings import (
    INSTRUCTION,
    SYSTEM,
    CollectionConfig,
    Config,
    DataConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LearningConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    RewardConfig,
    SamplingConfig,
)
