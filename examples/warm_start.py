"""Trains the policy that the built-in task starts from: supervised learning on an unreliable demonstrator.

    python examples/warm_start.py --config=configs/tiny.py [--output=DIR]

The result ships in the package (`assets/cipher`), as a Hugging Face folder. The same seed gives the same weights, up
to the rounding of the machine. It solves about a fifth of the words, most of them rarely: the regime in which a group
of four is often all wrong. `fit` also trains the first policies of other examples.
"""

import functools
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import flags

from reinforce_ada_jax import cli
from reinforce_ada_jax.data import cipher
from reinforce_ada_jax.data.tokenizer import Tokenizer
from reinforce_ada_jax.learning.batch import Batch, Example, make_batch
from reinforce_ada_jax.learning.learner import response_logprobs
from reinforce_ada_jax.learning.optimizer import warmup_schedule
from reinforce_ada_jax.learning.scan_logprobs import HeadConfig
from reinforce_ada_jax.policy import huggingface
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Execution, Params, init
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.types import Response

UPDATES, BATCH_SIZE, LEARNING_RATE, WARMUP_UPDATES = 210, 128, 3e-3, 20

_DEMONSTRATOR_SEED = 2609
NUM_HARD = 22
KNOWN_PROBABILITY = (0.88, 0.99)
HARD_PROBABILITY = (0.03, 0.12)
TYPICAL_ERROR_SHARE = 0.8


@functools.cache
def demonstrator() -> tuple[np.ndarray, np.ndarray]:
    """Returns the errors of the demonstrator.

    Returns:
      float[64], the probability that it deciphers symbol i correctly: 42 symbols in 0.88..0.99, 22 hard ones in
        0.03..0.12, so that a third of the letters is wrong and a fifth of the words is correct.
      int[64], the wrong letter that it typically gives for symbol i.
    """
    rng = np.random.default_rng(_DEMONSTRATOR_SEED)
    right = rng.uniform(*KNOWN_PROBABILITY, size=len(cipher.SYMBOLS))
    hard = rng.permutation(len(cipher.SYMBOLS))[:NUM_HARD]
    right[hard] = rng.uniform(*HARD_PROBABILITY, size=NUM_HARD)
    return right, _other_letters(cipher.key(), rng)


def _other_letters(letters: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns another letter for each letter, uniform over the 63 others."""
    return (letters + rng.integers(1, len(cipher.LETTERS), size=letters.shape)) % len(cipher.LETTERS)


def demonstrations(count: int, seed: int | np.random.Generator) -> list[tuple[str, str]]:
    """Returns `count` pairs (problem, answer of the demonstrator), of training words drawn with replacement.

    Each letter is correct with its symbol's probability. 80 % of the errors are the symbol's typical one, the rest are
    uniform over the 63 wrong letters.
    """
    rng = np.random.default_rng(seed)
    right, typical = demonstrator()
    drawn = [cipher.words("train")[i] for i in rng.integers(cipher.SPLIT_SIZES["train"], size=count)]
    symbols = np.array([cipher.SYMBOLS.index(symbol) for word in drawn for symbol in word], int)
    wrong = np.where(
        rng.random(symbols.shape) < TYPICAL_ERROR_SHARE, typical[symbols], _other_letters(cipher.key()[symbols], rng)
    )
    letters = np.where(rng.random(symbols.shape) < right[symbols], cipher.key()[symbols], wrong)
    answers = iter(cipher.LETTERS[letter] for letter in letters)
    return [(cipher.problem_text(word), "".join(next(answers) for _ in word)) for word in drawn]


def make_architecture(tokenizer: Tokenizer) -> Architecture:
    """Returns a Qwen2 of 107,000 weights over the task's characters."""
    return Architecture(
        family="qwen2",
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        ffn_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=64,
        norm_epsilon=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        qkv_bias=True,
        qk_norm=False,
        tied_embedding=True,
        eos_ids=tokenizer.stop_ids,
        bos_id=cipher.SPECIAL_TOKENS.index("<bos>"),
    )


def initial_params(architecture: Architecture, seed: int) -> Params:
    """Returns random weights, with query, key and value biases from N(0, 1): without them it hardly learns the task."""
    params = init(architecture, jax.random.key(seed))
    attention = params["layers"]["attention"]
    for index, name in enumerate(("query_bias", "key_bias", "value_bias")):
        key = jax.random.fold_in(jax.random.key(seed), 1 + index)
        attention[name] = jax.random.normal(key, attention[name].shape, jnp.float32)
    return params


def demonstration_batch(
    tokenizer: Tokenizer, rng: np.random.Generator, max_prompt_tokens: int, max_response_tokens: int
) -> Batch:
    """Returns a batch of the demonstrator's answers, each ended by the stop token."""
    rows = []
    for problem, answer in demonstrations(BATCH_SIZE, rng):
        tokens = np.append(tokenizer.encode(answer, add_special_tokens=False), tokenizer.stop_ids[0]).astype(np.int32)
        response = Response("", 0, tokens, np.zeros(len(tokens), np.float32), False)
        rows.append(Example(tokenizer.encode(problem), response))
    return make_batch(rows, max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens)


def fit(
    architecture: Architecture, params: Params, batches: Iterator[Batch], *, updates: int, learning_rate: float
) -> Params:
    """Trains on the responses of `batches`, one batch an update, by supervised learning."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(warmup_schedule(learning_rate, WARMUP_UPDATES), b2=0.98)
    )

    head = HeadConfig(temperature=1.0, tied=architecture.tied_embedding)

    def loss(params, batch):
        execution = Execution(jnp.float32, remat="full")
        logprobs = response_logprobs(architecture, params, batch, head, execution=execution)[0]
        return -jnp.sum(jnp.where(batch.response_mask, logprobs, 0.0)) / jnp.sum(batch.response_mask)

    @jax.jit
    def update(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    state, progress = optimizer.init(params), tqdm.trange(updates, desc="warm start", unit="update")
    for _ in progress:
        params, state, value = update(params, state, next(batches))
        progress.set_postfix(loss=f"{float(value):.3f}", refresh=False)
    return params


def main(config, output: pathlib.Path) -> None:
    """Trains, and writes tokenizer and weights into the new folder `output`."""
    with cli.user_input():
        if output.exists():
            raise ValueError(f"{output} exists already: remove it, or give another --output.")
    with tempfile.TemporaryDirectory() as tokenizer_folder:
        cipher.write_tokenizer(tokenizer_folder)
        tokenizer = Tokenizer.load(tokenizer_folder)
        architecture = make_architecture(tokenizer)
        limits = (config.data.max_prompt_tokens, config.sampling.max_response_tokens)
        rng = np.random.default_rng(config.seed)
        batches = iter(lambda: demonstration_batch(tokenizer, rng, *limits), None)
        params = initial_params(architecture, config.seed)
        params = fit(architecture, params, batches, updates=UPDATES, learning_rate=LEARNING_RATE)
        huggingface.save(output, architecture, params, tokenizer_from=tokenizer_folder)
    print(f"{architecture.num_parameters:,} weights written to {output}")


if __name__ == "__main__":
    CONFIG = cli.define_config()
    OUTPUT = flags.DEFINE_string(
        "output", str(components_lib.ASSETS / "cipher"), "The folder to write; it must not exist."
    )
    cli.run(lambda: main(CONFIG.value, pathlib.Path(OUTPUT.value)))
