"""Execution of the package's annotations in tests: by beartype, with ints where floats are annotated (PEP 484)."""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
