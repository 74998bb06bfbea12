"""MXFP4 tensors, as the published folders of gpt-oss have the matrices of their experts; they are read, not written.

A matrix [X, D] of an expert is stored as its transpose. Each row of the transpose is cut into blocks of 32 numbers. A
block has 16 bytes of two numbers each, the lower half of a byte first, and one power of two as its scale (OCP
Microscaling Formats 1.0, section 5). The numbers have a sign, two bits of exponent and one of mantissa, so that
bfloat16 holds every product exactly.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from reinforce_ada_jax.policy.weight_files import Header

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the names of a matrix's two tensors
BLOCK_BYTES, BIAS = 16, 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = np.array([sign * number for sign in (1.0, -1.0) for number in MAGNITUDES], np.float32)


def joined(headers: dict[str, Header]) -> dict[str, Header]:
    """Returns headers in which blocks with their scales are one tensor of bfloat16; others do not change."""
    found = dict(headers)
    for name, blocks in headers.items():
        whole = name.removesuffix(BLOCKS)
        scales = headers.get(whole + SCALES)
        if whole == name or whole in headers or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        if len(blocks.shape) == 4 and blocks.shape == (*scales.shape, BLOCK_BYTES):
            experts, columns, count, _ = blocks.shape
            shape = experts, count * 2 * BLOCK_BYTES, columns
            found[whole] = dataclasses.replace(blocks, shape=shape, dtype="BF16", scales=scales)
            del found[name], found[whole + SCALES]
    return found


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns matrices [E, rows, columns] in bfloat16 of blocks [E, columns, G, 16] and scales [E, columns, G]."""
    experts, columns, *rest = blocks.shape
    result = np.empty((experts, math.prod(rest) * 2, columns), jnp.bfloat16)
    for expert in range(experts):  # one at a time: in float32 all would take 7.5 times the file's size
        halves = np.stack([blocks[expert] & 15, blocks[expert] >> 4], axis=-1).reshape(columns, -1, 2 * BLOCK_BYTES)
        exponents = scales[expert, :, :, None].astype(np.int32) - BIAS
        with np.errstate(over="ignore"):  # the caller refuses numbers that are not finite
            result[expert] = np.ldexp(NUMBERS[halves], exponents).reshape(columns, -1).T
    return result
