"""How tests compile; imported before jax is."""

# Tests spend their time compiling tiny programs. Without optimisation, and with XLA's older emitters of loops in place
# of those that go through MLIR, that takes a sixth of the time.
QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
