"""Published rows with groups of ranks, experts, heads of other sizes: priced as what they ran."""

from __future__ import annotations

import pytest

from autopar.api.as_run import AsRun
from autopar.api.solved import Solved
from autopar.api.solving import Waiting
from autopar.api.validating import estimates_of
from autopar.api.wishes import Wishes
from autopar.ir.plan import Estimates
from autopar.search.ilp import Solution
from cost_models.training_rows import read_training_row
from tests.support.training_row import ROW

SMALL = {
    **ROW, "family": "llama", "hidden": "256", "heads": "4", "kv_heads": "4", "ffn_hidden": "1024", "vocab": "1024",
    "seq_len": "1024", "gpus": "16", "layers": "4", "dp": "16", "tp": "1", "pp": "1", "global_batch": "64",
    "attention": "flash", "recompute": "none", "year": "2024", "framework": "fsdp",
}  # fmt: skip
SLOW = {"inter_node_Gbit_per_s_per_node": "10"}
"""A fabric on which what crosses nodes takes longer than all else."""


def _priced(**change: str) -> Estimates:
    return estimates_of(read_training_row({**SMALL, **change}))


def test_hybrid_sharding_gathers_inside_nodes_and_holds_a_nodes_share():
    everywhere, inside = _priced(zero="full_shard", **SLOW), _priced(zero="hybrid_shard", **SLOW)

    assert inside.memory.parameters == pytest.approx(2 * everywhere.memory.parameters, rel=0.01)
    assert inside.memory.optimizer == pytest.approx(2 * everywhere.memory.optimizer, rel=0.01)
    # Across nodes a micro-batch's gradients alone, each rank's share of them: of two gathers and a scatter two thirds.
    exposed = [each.breakdown.exposed_communication_s for each in (inside, everywhere)]
    assert exposed[0] < 0.75 * exposed[1]


def test_tensor_parallel_ranks_exchange_no_more_where_parameters_are_sharded_among_others(
    monkeypatch: pytest.MonkeyPatch,
):
    """Rows of a matrix that tensor parallelism splits are not first split among data-parallel ranks."""
    found: list[int] = []
    solved = AsRun._outcome

    def noting(self: AsRun, one: Waiting, wishes: Wishes, solution: Solution) -> Solved:
        outcome = self.outcome(one, wishes, solution)
        tensor = [axis.role for axis in one.trial.mesh].index("tp")
        found.append(sum(each.message.bytes for each in outcome.messages() if each.message.axis == tensor))
        return solved(self, one, wishes, solution)

    monkeypatch.setattr(AsRun, "_outcome", noting)
    for zero in ("3", "0"):
        _priced(dp="4", tp="4", zero=zero, sequence_parallel="yes", hidden="1024", ffn_hidden="4096")

    assert 0 < found[0] < 1.1 * found[1]


def test_a_group_that_is_all_ranks_is_no_hybrid():
    assert _priced(zero="3", dp_shard="16") == _priced(zero="3")
    assert _priced(zero="1", dp_shard="16") == _priced(zero="1")


def test_an_optimizer_sharded_inside_nodes_is_reduced_across_by_its_parts():
    # Of 16 ranks on two nodes: scattered over all and gathered again, or scattered inside and all-reduced across by
    # each rank its eighth: the same bytes cross.
    core = {"framework": "megatron-core", "zero": "1", **SLOW}
    everywhere, inside = _priced(**core), _priced(**core, dp_shard="8")

    assert inside.memory.optimizer == pytest.approx(2 * everywhere.memory.optimizer, rel=0.01)
    assert inside.step_time_s == pytest.approx(everywhere.step_time_s, rel=0.1)


def test_context_parallelism_splits_what_is_kept_and_exchanges_for_attention():
    whole, split = _priced(zero="1"), _priced(zero="1", dp="8", cp="2")

    assert split.memory.activations == pytest.approx(whole.memory.activations / 2, rel=0.15)
    assert split.memory.optimizer == pytest.approx(whole.memory.optimizer, rel=0.01)
    # As many tokens a rank: twice the samples, of half the length.
    alike = _priced(zero="1", dp="8", cp="2", micro_batch="2")
    assert alike.breakdown.compute_s == pytest.approx(whole.breakdown.compute_s, rel=0.15)
    assert alike.breakdown.exposed_communication_s > whole.breakdown.exposed_communication_s


def test_experts_compute_what_a_feed_forward_of_those_chosen_does_and_are_held_in_parts():
    dense = _priced(zero="0", ffn_hidden="2048")
    mixed = _priced(zero="0", experts="8", top_k="2")
    split = _priced(zero="0", experts="8", top_k="2", ep="8")

    experts = 4 * 3 * 7 * 256 * 1024 * 2  # layers, matrices, seven more experts, bf16
    assert mixed.memory.parameters - split.memory.parameters == pytest.approx(experts, rel=0.01)
    assert mixed.breakdown.compute_s > dense.breakdown.compute_s, "tokens are brought to experts and back"
    assert split.breakdown.exposed_communication_s > mixed.breakdown.exposed_communication_s


def test_heads_of_another_size_have_matrices_of_it():
    usual, wide = _priced(zero="0"), _priced(zero="0", head_dim="128")

    # Four layers' four projections, between 256 and four heads of 64 or of 128, in bf16.
    assert wide.memory.parameters - usual.memory.parameters == 4 * 4 * 256 * 4 * 64 * 2
    assert _priced(zero="0", head_dim="64") == usual


def test_norms_of_queries_and_keys_are_in_models_that_have_them():
    assert _priced(zero="0", model="Qwen3-1.7B").breakdown.compute_s > _priced(zero="0").breakdown.compute_s


def test_pythia_has_an_output_embedding_of_its_own_and_positions_that_turn():
    tied, pythia = (_priced(zero="0", family="gpt", vocab="4096", model=model) for model in ("GPT", "Pythia-1B"))

    # Of its own: the output embedding. Not there: 1024 learned positions.
    assert pythia.memory.parameters - tied.memory.parameters == (4096 - 1024) * 256 * 2
    assert pythia.breakdown.compute_s > tied.breakdown.compute_s


def test_zero_2_scatters_each_micro_batchs_gradients_and_zero_1_their_sums():
    shown = {
        (zero, batch): _priced(zero=zero, global_batch=batch, framework="deepspeed", **SLOW).breakdown
        for zero in ("1", "2")
        for batch in ("16", "64")
    }
    exposed = {key: each.exposed_communication_s for key, each in shown.items()}

    assert exposed["2", "16"] == exposed["1", "16"]
    # A scatter is half of what a step sends; three micro-batches more send one each, less what their backwards hide.
    assert 2 * exposed["1", "64"] < exposed["2", "64"] < 2.5 * exposed["1", "64"]
