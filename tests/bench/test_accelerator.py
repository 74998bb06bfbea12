"""`bench.accelerator` on a CPU and a toy model: what is counted, and that a part that fails is reported."""

import jax
import pytest

from bench import accelerator, command_line, models
from tests import standins
from tests.bench.test_rollout import parsed

SIZES = dict(
    slots=2, window=4, page_size=4, prefill_tokens=8, requests=3, prompt_tokens=6, response_tokens=5, rows=4,
    micro_batches=2, copy_mb=1, repeat=1, seed=0,
)  # fmt: skip
FLAGS = [f"--{name}={value}" for name, value in SIZES.items()]
OPTIONS = parsed("--dtype=bfloat16", *FLAGS)
ARCHITECTURE = models.smallest()


def test_shares_are_of_the_ceilings_and_the_mfu_of_the_published_peak():
    parts = accelerator.with_shares({
        "ceilings": {"copy_bytes_per_s": 2e12, "product_flops_per_s": 8e14, "device": "NVIDIA H100 80GB HBM3"},
        "hand_over": {"seconds": 0.01, "bytes": 10**10},
        "update": {"seconds": 2.0, "flops": 989 * 10**12},
        "loss": {"failed": "not finished after 3 s"},
    })  # fmt: skip
    assert parts["hand_over"]["share_of_bytes_ceiling"] == 0.5
    assert parts["update"]["mfu"] == 0.5 and parts["update"]["share_of_flops_ceiling"] == pytest.approx(0.618125)
    assert parts["loss"] == {"failed": "not finished after 3 s"}


def test_without_ceilings_the_other_parts_are_still_reported():
    parts = {"ceilings": {"failed": "exit code 1"}, "hand_over": {"seconds": 1.0, "bytes": 8}}
    assert accelerator.with_shares(parts) == parts


def test_a_part_that_fails_or_does_not_end_is_reported(capfd):
    failed = accelerator.measured("nothing", OPTIONS, 300.0)
    assert failed == {"nothing": {"failed": "exit code 1; its messages are above"}}
    assert "KeyError: 'nothing'" in capfd.readouterr().err
    late = accelerator.measured("ceilings", OPTIONS, 0.01)
    assert late == {"ceilings": {"failed": "not finished after 0 s"}}


def test_the_hand_over_and_the_loss_count_what_they_must_do():
    hand_over = accelerator.hand_over(ARCHITECTURE, OPTIONS)["hand_over"]
    assert hand_over["bytes"] == 6 * ARCHITECTURE.num_parameters and hand_over["seconds"] > 0
    loss = accelerator.head_loss(ARCHITECTURE, OPTIONS)["loss"]
    assert loss["tokens"] == 2 * 5 and loss["flops"] == 6 * 32 * 16 * 10 and loss["head_backend"] == "scan"


def test_attention_over_pages_counts_what_slots_see(monkeypatch):
    standins.constants(monkeypatch, accelerator, WINDOW=3)
    pages = accelerator.pages(ARCHITECTURE, OPTIONS)["pages"]
    a = ARCHITECTURE
    number = a.num_layers * a.num_kv_heads * a.head_dim
    tokens = pages["bfloat16"]["jnp"]["bytes"] // (2 * 2 * number)
    assert 2 * 5 <= tokens <= 2 * 11  # two slots hold half to all of 11 tokens
    assert pages["float32"]["jnp"]["bytes"] == 2 * pages["bfloat16"]["jnp"]["bytes"] == 2 * pages["bytes"]
    assert pages["int8"]["jnp"]["bytes"] == 2 * tokens * (number + 4 * a.num_layers * a.num_kv_heads)
    assert pages["window"]["jnp"]["bytes"] == 2 * 2 * 3 * 2 * number
    assert all(pages[kind]["jnp"]["difference"] == 0 for kind in ("bfloat16", "float32", "int8", "window"))


@pytest.mark.slow  # a test below compares implementations of attention
def test_a_kernel_is_compared_with_jnp(monkeypatch):
    plain = accelerator.paged_attention

    def other(*arrays, backend, **options):
        return plain(*arrays, backend="jnp", **options) * (1.5 if backend == "pallas_gpu" else 1)

    monkeypatch.setattr(accelerator, "paged_attention", other)
    standins.constants(monkeypatch, accelerator, FOR_PLATFORM={"cpu": "pallas_gpu"})
    pages = accelerator.pages(ARCHITECTURE, OPTIONS)["pages"]
    assert pages["float32"]["pallas_gpu"]["difference"] == pytest.approx(0.5)
    assert pages["seconds"] == pages["bfloat16"]["pallas_gpu"]["seconds"]


def test_implementations_of_attention_are_compared(monkeypatch):
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention mixes dtypes in its gradient
        found = accelerator.attention(ARCHITECTURE, OPTIONS)["attention"]
    a = ARCHITECTURE
    # Rows of a sequence of 6 tokens and one of 5.
    assert found["flops"] == 7 * a.num_heads * a.head_dim * 4 * (36 + 25)
    assert (found["chosen"], found["seconds"]) == ("blocks", found["blocks"]["seconds"])
    assert found["jnp"]["difference"] == 0 and 0 < found["blocks"]["difference"] < 0.02

    standins.failing(monkeypatch, accelerator, "choose_attention", NotImplementedError("no kernel\nfor this"))
    failed = accelerator.attention(ARCHITECTURE, OPTIONS)["attention"]
    assert failed["blocks"] == {"failed": "no kernel"} and "seconds" not in failed


@pytest.mark.slow
def test_the_command_runs_all_parts():
    found = command_line.measured(accelerator.run, parsed("--shape=16x1", *FLAGS), auto_dtype="bfloat16")
    assert found["ceilings"]["platform"] == "cpu" and found["sizes"]["dtype"] == "bfloat16"
    assert found["prefill"]["tokens"] == 3 * 5  # the last token of a prompt starts its response
    assert found["decode"]["tokens"] == 3 * 5 and found["decode"]["steps"] >= 8
    assert found["update"]["attention"] == "blocks"
    for name, unit in {"hand_over": "bytes", "prefill": "flops", "decode": "bytes", "loss": "flops"}.items():
        assert found[name][f"share_of_{unit}_ceiling"] > 0
