"""Random operators: equal where ranks hold the same part, different where they do not, decided by the step's seed."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.placement import Shard
from autopar.rewrite.random_ops import mixed, next_seed, seeded, step_seed
from autopar.strategies.call import Call
from autopar.strategies.random import RULES
from autopar.strategies.table import rule_of
from tests.strategies.make import c, f, p
from tests.strategies.one_op import Case, mesh_of, on_mesh, part, program
from tests.support.lockstep import run

CALLS = [
    c("native_dropout.default", torch.ones(8, 8, dtype=torch.float64), 0.5, True),
    c("bernoulli.p", f(8, 8), 0.5),
    c("bernoulli.default", p(8, 8)),
    c("rand_like.default", f(8, 8)),
    c("randn_like.default", f(8, 8)),
    c("randint_like.default", f(8, 8), 1000),
    c("exponential.default", f(8, 8)),
    c("uniform.default", f(8, 8)),
    c("normal_functional.default", f(8, 8)),
    c("rand.default", [8, 8], dtype=torch.float64),
    c("randn.default", [8, 8], dtype=torch.float64),
    c("randint.low", 0, 1000, [8, 8]),
    c("_standard_gamma.default", p(8, 8)),
    c("_sample_dirichlet.default", p(8, 8)),
    c("binomial.default", 50 + p(8, 8), p(8, 8)),
    c("multinomial.default", p(8, 8), 8, True),
    c("rrelu_with_noise_functional.default", -p(8, 8), f(8, 8), 0.1, 0.9, True),
    c("randperm.default", 64),
]


def results(case: Case, sizes: tuple[int, ...], chosen: tuple[int, ...], seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Return each rank's outputs when the axes use the strategies at `chosen`."""
    strategy = on_mesh(case, tuple(case.strategies(n)[i] for n, i in zip(sizes, chosen, strict=True)), sizes)
    assert strategy is not None
    mesh = mesh_of(sizes)
    ranks = range(mesh.world_size)
    inputs = [
        [part(t, layout, sizes, mesh.coordinate(rank)) for t, layout in zip(case.tensors, strategy.inputs, strict=True)]
        for rank in ranks
    ]
    with step_seed(seed):
        return run([program(case, strategy, mesh, rank) for rank in ranks], inputs, mesh)


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.target)
def test_replicas_draw_the_same(case: Case) -> None:
    first, second = results(case, (2,), (0,), seed=1)

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", CALLS[:-1], ids=lambda case: case.target)
def test_shards_draw_different_numbers(case: Case) -> None:
    first, second = results(case, (2,), (1,), seed=1)

    assert first[0].shape == (4, 8)
    assert not torch.equal(first[0], second[0])


def test_an_operator_that_draws_and_has_no_rule_is_drawn_alike() -> None:
    rule, case = rule_of("aten._fused_dropout.default"), c("native_dropout.default", f(8, 8), 0.5, True)

    assert rule is not None
    assert [str(each) for each in rule(Call(case.op, case.metas, 2, ()))] == ["R->R,R (random)"]


def test_replicas_of_shards_draw_the_same() -> None:
    made = [out[0] for out in results(CALLS[0], (2, 2), (0, 1), seed=1)]

    assert torch.equal(made[0], made[2])
    assert torch.equal(made[1], made[3])
    assert not torch.equal(made[0], made[1])


def test_another_step_draws_other_numbers_and_the_same_step_the_same() -> None:
    once, again, other = (results(CALLS[0], (2,), (1,), seed=seed)[0][0] for seed in (1, 1, 2))

    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_another_operator_draws_other_numbers() -> None:
    drop = seeded("aten.native_dropout.default")

    with step_seed(0):
        assert not torch.equal(drop(1, torch.ones(64), 0.5, True)[1], drop(2, torch.ones(64), 0.5, True)[1])


def test_dropout_keeps_the_share_it_is_told_to() -> None:
    with step_seed(3):
        _, kept = seeded("aten.native_dropout.default")(5, torch.ones(100_000), 0.25, True)

    assert abs(kept.double().mean().item() - 0.75) < 0.01


def test_dropout_outside_training_draws_nothing() -> None:
    case = c("native_dropout.default", f(8, 8), 0.5, False)

    assert {each.lowering for each in case.strategies(2)} == {""}


def test_drawing_leaves_the_users_generator_alone() -> None:
    before = torch.get_rng_state()

    with step_seed(0):
        seeded("aten.rand.default")(0, [4])

    assert torch.equal(before, torch.get_rng_state())


def test_manual_seed_decides_the_seed_of_a_step() -> None:
    torch.manual_seed(5)
    first = next_seed(), next_seed()
    torch.manual_seed(5)

    assert (next_seed(), next_seed()) == first
    assert first[0] != first[1]


def test_seeds_of_neighbouring_operators_are_unrelated() -> None:
    seeds = {mixed(seed, salt) for seed in range(30) for salt in range(30)}

    assert len(seeds) == 900
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_drawing_outside_a_step_is_refused() -> None:
    with pytest.raises(RuntimeError, match="outside of `step_seed`"):
        seeded("aten.rand.default")(0, [4])


def test_every_drawing_strategy_names_its_lowering() -> None:
    assert {each.lowering for case in CALLS for each in case.strategies(2)} == {"random"}
    assert {case.target for case in CALLS} <= set(RULES)
    assert Shard(0) in {each.outputs[0] for each in CALLS[0].strategies(2)}
