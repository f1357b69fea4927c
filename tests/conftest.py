"""What several test folders use: ranks, a small plan made by hand, and golden texts."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from autopar.ir.mesh import Axis, Mesh
from autopar.ir.placement import Partial, Replicate, Shard
from autopar.ir.plan import (
    Alternative,
    Breakdown,
    Collective,
    Decisions,
    Estimates,
    Fingerprint,
    Memory,
    OperatorDecision,
    ParameterDecision,
    Plan,
    Schedule,
    Solver,
    Stage,
    Warned,
    Workload,
)
from autopar.ir.strategy import Inner, MeshStrategy, Strategy
from autopar.ir.tensor import TensorMeta

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

R = Replicate()

# A busy machine is no reason to fail, and a run today finds what a run tomorrow finds.
settings.register_profile("autopar", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("autopar")


_PROGRAMS = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Name a folder for captured programs to the workers of the run and their ranks: all inherit the variable."""
    if "AUTOPAR_TESTS_PROGRAMS" not in os.environ:
        config.stash[_PROGRAMS] = folder = tempfile.TemporaryDirectory(prefix="autopar-programs-")
        os.environ["AUTOPAR_TESTS_PROGRAMS"] = folder.name


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder where it was made."""
    if _PROGRAMS in config.stash:
        del os.environ["AUTOPAR_TESTS_PROGRAMS"]
        config.stash[_PROGRAMS].cleanup()


def pytest_collection_finish() -> None:
    """Capture no program twice, and let the garbage collector pass over what imports and collection made: it stays."""
    if "autopar.api.compiling" in sys.modules:
        from tests.support.remembering import remember_programs

        remember_programs()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # as seldom as planning has it, which then leaves it alone


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write golden files instead of comparing with them")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks on this machine, for all tests of a file."""
    from tests.support.ranks import RankPool

    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks on this machine, for all tests of a file."""
    from tests.support.ranks import RankPool

    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file `golden/NAME` beside the test; `pytest --update-goldens` writes it."""

    def compare(name: str, text: str) -> None:
        path = Path(request.path).parent / "golden" / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; if it should: pytest --update-goldens"

    return compare


def _replicated(count: int) -> Strategy:
    return Strategy((R,) * count, (R,))


def _operator(name: str, target: str, dp: Strategy, tp: Strategy, *, reads: tuple[str, ...] = (), **more: object):
    strategy = MeshStrategy(
        (dp, tp),
        tuple(zip(dp.inputs, tp.inputs, strict=True)),
        tuple(zip(dp.outputs, tp.outputs, strict=True)),
    )
    return name, OperatorDecision(target=target, strategy=strategy, inputs=reads, **more)


@pytest.fixture
def small_plan() -> Plan:
    """A two-layer MLP on (dp_shard=2, tp=4): column and row split, one sharded parameter gathered."""
    batch = Strategy((Shard(0), R), (Shard(0),))
    layer = {"module": "layers.0", "source": "mlp.py:12", "instances": 3}
    operators = dict(
        (
            _operator("x", "x", Strategy((), (Shard(0),)), Strategy((), (R,)), output=TensorMeta((16, 64), "float32")),
            _operator("w1", "up.weight", Strategy((), (R,)), Strategy((), (Shard(1),))),
            _operator("w2", "down.weight", Strategy((), (R,)), Strategy((), (Shard(0),))),
            _operator(
                "mm", "aten.mm.default", batch, Strategy((R, Shard(1)), (Shard(1),)),
                reads=("x", "w1"), output=TensorMeta((16, 256), "float32"), predicted_s=1.5e-5, **layer,
            ),
            _operator(
                "mm_1", "aten.mm.default", batch, Strategy((Shard(1), Shard(0)), (Partial(),)),
                reads=("mm", "w2"), output=TensorMeta((16, 64), "float32"), predicted_s=1.25e-5, **layer,
            ),
            _operator(
                "loss", "aten.cross_entropy_loss.default", Strategy((Shard(0),), (Partial("avg"),)),
                Strategy((Shard(1),), (R,), "vocab_loss", (Inner("all_reduce", "float32", "max", without=(1,)),)),
                reads=("mm_1",), output=TensorMeta((), "float32"), source="mlp.py:20",
            ),
        )
    )  # fmt: skip
    mesh = Mesh((Axis("dp_shard", 2, "pod"), Axis("tp", 4, "node")))
    return Plan(
        fingerprint=Fingerprint(graph="g" * 64, cluster="c" * 64, torch="2.13.0"),
        workload=Workload(
            model="zoo:mlp", global_batch=16, microbatch=8, num_microbatches=1,
            precision="bf16", optimizer="adamw", tokens_per_step=None,
        ),
        cluster={
            "version": 1,
            "name": "two-pods",
            "nodes": {"dgx": {"preset": "dgx-h100", "count": 4}},
            "groups": [{"node": "dgx", "count": 1}],
        },
        decisions=Decisions(
            degrees={"dp_shard": 2, "tp": 4},
            mesh=mesh,
            parameters={
                "up.weight": ParameterDecision(placements=(Shard(0), Shard(1)), gather="per_phase"),
                "down.weight": ParameterDecision(placements=(R, Shard(0, outer=8))),
            },
            operators=operators,
            outputs={"loss": (R, R)},
            collectives=(
                Collective(
                    op="all_gather", axis="dp_shard", level="pod", bytes=16384, count=2, phase="forward",
                    tensor="up.weight", overlapped=True, predicted_s=2e-5,
                ),
                Collective(
                    op="all_reduce", axis="tp", level="node", bytes=4096, count=3, phase="forward",
                    tensor="mm_1", overlapped=False, predicted_s=3e-5,
                ),
            ),
            stages=(Stage(index=0, ranks=tuple(range(8)), blocks=("layers.0",), parameters=("up.weight",)),),
            schedule=Schedule(),
            recompute={},
        ),
        estimates=Estimates(
            step_time_s=2e-4,
            mfu=0.25,
            peak_memory_bytes=3 * 2**20,
            memory=Memory(
                parameters=2**20, gradients=2**19, optimizer=2**20, activations=2**18, temporary=2**17, reserved=2**17
            ),
            memory_budget_bytes=72 * 2**30,
            communication_bytes=45056,
            breakdown=Breakdown(
                compute_s=1.2e-4, exposed_communication_s=6e-5, bubble_s=0.0, optimizer_s=2e-5,
            ),
            sources={"compute": "roofline: max(flops / rate, bytes / bandwidth); catalog h100-sxm-80gb"},
        ),
        solver=Solver(
            status="optimal", objective=2e-4, bound=1.99e-4, gap=0.005, seconds=None, seed=0, candidates=12
        ),
        constraints={"memory_margin": 0.1, "fix": {"tp": 4}},
        alternatives=(
            Alternative(degrees={"dp_shard": 8}, step_time_s=3e-4, peak_memory_bytes=2**22, why_not="50 % slower"),
            Alternative(
                degrees={"dp_replicate": 8}, step_time_s=None, peak_memory_bytes=80 * 2**30,
                why_not="needs 80.00 GiB, budget 72.00 GiB",
            ),
        ),
        warnings=(Warned(code="replicated", text="aten.foo has no sharding rule", location="mlp.py:14"),),
        autopar_version="0.1.0",
    )  # fmt: skip


@pytest.fixture
def slower_plan(small_plan: Plan) -> Plan:
    """The small plan made 20 % slower, larger, chattier, and `up.weight` replicated over dp_shard."""
    old, decided = small_plan.estimates, small_plan.decisions
    moved = ParameterDecision(placements=(R, Shard(1)))
    memory = replace(old.memory, activations=old.memory.activations + 2**20)
    return replace(
        small_plan,
        estimates=replace(
            old,
            step_time_s=2.4e-4,
            breakdown=replace(old.breakdown, exposed_communication_s=1e-4),
            memory=memory,
            peak_memory_bytes=memory.total,
            communication_bytes=90112,
        ),
        decisions=replace(
            decided,
            parameters={**decided.parameters, "up.weight": moved},
            collectives=(replace(decided.collectives[1], count=6, predicted_s=6e-5),),
        ),
    )
