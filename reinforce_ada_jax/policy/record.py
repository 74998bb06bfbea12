"""The base of records that programs take and return."""

from flax import struct


class Record(struct.PyTreeNode):
    """Frozen pytree of arrays. JAX also puts shardings and shapes into it, so fields are not checked at run time."""

    __no_type_check__ = True
