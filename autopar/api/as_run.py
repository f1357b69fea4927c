"""A configuration that somebody ran: everything is given, and other software than ours ran it.

What differs from a plan of ours: it did fit; its layers were spread evenly over stages; parameters and gradients
travelled in flat buffers; an optimizer may be sharded whose parameters are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, prod

from autopar.api.block_memory import BlockMemory
from autopar.api.pipelining import pipelined
from autopar.api.solved import Solved
from autopar.api.solving import Solving, Waiting
from autopar.api.wishes import Wishes
from autopar.costs.links import AGAIN, Links, Message
from autopar.costs.outcome import Outcome
from autopar.costs.travelling import travelling
from autopar.errors import InfeasibleError
from autopar.ir.graph import Graph
from autopar.ir.plan import Estimates
from autopar.ir.stages import stage_of, units
from autopar.search.cuts import NoCut
from autopar.search.fitting import solve_program
from autopar.search.ilp import Ilp, Limits, Solution
from autopar.search.trials import Recompute, Trial
from cost_models.cluster import ClusterSpec
from cost_models.exchanges import sent_share
from cost_models.experts_cells import Mixture
from cost_models.frameworks import pytorch
from cost_models.memory import with_master, with_shards
from cost_models.stack import Stack
from cost_models.topology import axis_hops

_UNLIMITED = 1 << 60

_NARROW_SHARE = 0.5
"""Of the bytes of values of 16 bits, those of the 8 bits that they are cast to."""


@dataclass
class AsRun(Solving):
    """Solving for one trial that leaves nothing open but layouts inside the tensor-parallel group."""

    stack: Stack = field(default_factory=pytorch)
    masters: bool = True
    """Whether the optimizer has float32 copies of parameters of 16 bits, and its state in float32."""

    sharded_optimizer: bool = False
    """Whether each rank holds the optimizer's state of a part of its parameters (ZeRO 1 and 2)."""

    replicas: int = 1
    """Ranks over which a sharded optimizer is."""

    scatters_each: bool = False
    """Whether each micro-batch's gradients are scattered over these (ZeRO 2), not their sums alone."""

    mixture: Mixture | None = None
    """Experts of the model that ran."""

    peak_dtype: str = "bfloat16"
    """The type whose peak MFU refers to."""

    offloaded: int = 0
    """Blocks, the first, whose activations wait in the host's memory for backward; they travel behind computation."""

    def budget_of(self, cluster: ClusterSpec) -> int:
        """Return more bytes than any device has."""
        del cluster
        return _UNLIMITED

    def graph(self, recompute: Recompute, wishes: Wishes) -> Graph:
        """Return the program as it was given: what is recomputed in it runs again already."""
        del recompute, wishes
        return self.program

    def links(self, trial: Trial) -> Links:
        """Return the prices of moving data as the software does it."""
        sizes = tuple(axis.size for axis in trial.mesh)
        tensor = _axis(trial, "tp")
        return Links(
            self.cluster,
            sizes,
            int(trial.microbatches > 1),
            sharded=self._sharded(trial),
            across_axis=next(iter(self._replicas(trial)[:-1]), -1) if self.sharded_optimizer else -1,
            hides_reductions=self.stack.overlaps,
            gathers_ahead=self.stack.gathers_ahead,
            reduces_each=any(axis.role == "dp_shard" for axis in trial.mesh),
            kept_axis=tensor,
            hidden_share=self._hidden_share(trial),
            again_axes=self._again_axes(trial),
            sent_share=self._sent_share(trial),
            whole_axis=-1 if self.options.fix.get("sequence_parallel", True) else tensor,
            packs=False,
            flat_bytes=_block_bytes(self.program, prod(axis.size for axis in trial.mesh if axis.role == "tp")),
        )

    def _again_axes(self, trial: Trial) -> frozenset[int]:
        """Return the axes along which ranks keep their own part of what they gather, and gather again for backward.

        Along `cp` all do that split positions, in rings or not (Transformer Engine's `AttnFuncWithCPAndKVP2P` and
        `AttnFuncWithCPAndKVAllGather`, torch's `_templated_ring_attention_backward`); those that exchange heads gather
        nothing.
        """
        roles = {"cp", "tp"} if self.stack.gathers_again else {"cp"}
        return frozenset(place for place, axis in enumerate(trial.mesh) if axis.role in roles)

    def _hidden_share(self, trial: Trial) -> Mapping[tuple[int, str], float]:
        """Return the shares of collectives that products hide, by axis and operation."""
        tensor, context = _axis(trial, "tp"), _axis(trial, "cp")
        found = {(tensor, op): share for op, share in self._hidden_tensor_share(trial).items()}
        if self.stack.rings:
            found |= {(context, op): 1.0 for op in ("all_gather", "reduce_scatter", AGAIN)}
        staged = int(self.options.fix.get("interleave", 1)) > 1
        if self._nodes_of_experts(trial) > 1 and (self.stack.hides_exchanges or (staged and self._joins_exchanges)):
            found[_axis(trial, "ep"), "all_to_all"] = 1.0
        return found

    @property
    def _joins_exchanges(self) -> bool:
        return self.stack.joins_exchanges_from > 0

    def _nodes_of_experts(self, trial: Trial) -> int:
        """Return over how many nodes the experts of one group of ranks are; 1 where they are not split."""
        place = _axis(trial, "ep")
        if place < 0:
            return 1
        ranks = tuple(axis.size for axis in trial.mesh if axis.role != "microbatch")
        first = place - (len(trial.mesh) - len(ranks))
        inside = self.cluster.levels[0].name
        return prod(hop.ranks for hop in axis_hops(self.cluster.levels, ranks, first) if hop.level != inside)

    def _sent_share(self, trial: Trial) -> Mapping[tuple[int, str], float]:
        """Return the shares of what is moved that are sent.

        Of what experts exchange, where a token goes to a node once; of what linears gather, where it is cast before.
        """
        found = {}
        if self.stack.gathers_narrow and self.cluster.device.narrow:
            found[_axis(trial, "tp"), "all_gather"] = _NARROW_SHARE
        place = _axis(trial, "ep")
        if place >= 0 and self.mixture is not None and self._joins_exchanges:
            nodes = self._nodes_of_experts(trial)
            kept = sent_share(nodes, self.mixture.chosen, self.mixture.groups, self.mixture.reached)
            found[place, "all_to_all"] = kept
        return found

    def _hidden_tensor_share(self, trial: Trial) -> Mapping[str, float]:
        """Return the share of tensor-parallel collectives that products hide, by operation.

        Where only backward's run behind weight gradients: of a layer's sums those of backward, one pass of two or,
        where layers run again, of three; of scatters likewise. What weight gradients need gathered comes behind the
        product before them.
        """
        if self.stack.overlaps_tensor:
            return {"all_gather": 1.0, "reduce_scatter": 1.0, AGAIN: 1.0}
        passes = 3 if trial.recompute in {"full", "whole"} else 2
        share = 1 / passes if self.stack.hides_backward else 0.0
        return {"all_reduce": share, "reduce_scatter": share, AGAIN: 1.0}

    def _sharded(self, trial: Trial) -> tuple[int, float]:
        """Return the axis that an optimizer is sharded over, and bytes of a parameter over its gradient's."""
        if not self.sharded_optimizer:
            return -1, 0.0
        axis = next(reversed(self._replicas(trial)), -1)
        return axis, 0.5 if self.stack.float32_gradients and self.options.precision == "bf16" else 1.0

    @staticmethod
    def _replicas(trial: Trial) -> tuple[int, ...]:
        """Return the axes whose ranks hold the same parameters, the outermost first."""
        return tuple(place for place, each in enumerate(trial.mesh) if each.role == "dp_replicate")

    @property
    def optimizer(self) -> str:
        """Return the optimizer: on float32 copies of parameters of 16 bits, but where software keeps none; sharded.

        Over the ranks that hold the same.

        Plans of ours have no such copies: the user's optimizer updates the parameters that the model has.
        """
        mixed = self.masters and self.options.precision != "fp32" and _has_short_parameters(self.program)
        name = with_master(self.options.optimizer) if mixed else self.options.optimizer
        return with_shards(name, self.replicas) if self.sharded_optimizer else name

    def estimates(self, trial: Trial, wishes: Wishes) -> Estimates:
        """Return what is predicted of the trial.

        Raises:
            InfeasibleError: the program does not admit it.
            CostModelError: the cluster has no price for something.
        """
        links, pricing = self.price(trial, wishes)
        waiting = Waiting(trial, links, pricing, Ilp(pricing.table), 0.0, 0.0)
        limits = Limits(_UNLIMITED, self.options.time_limit, self.options.gap, self.options.seed, inf)
        solution = solve_program(waiting.program, limits)
        if not solution.options:
            raise InfeasibleError(f"no layouts found for this configuration: {solution.status}")
        solved = self._outcome(waiting, wishes, solution)
        if solved.outcome is None:
            raise InfeasibleError(solved.why_not)
        found = solved.outcome.estimates(_UNLIMITED, self.peak_dtype, self.model_flops)
        if solved.pipeline is not None:
            return solved.pipeline.estimates(found)
        if self.offloaded:
            found = _smaller(found, _offloaded_bytes(solved.outcome, self.offloaded))
        return _longer(found, self._scatters_s(solved.outcome)) if self.scatters_each else found

    def _scatters_s(self, outcome: Outcome) -> float:
        """Return what shows of the scatters of gradients of all micro-batches but the last, whose are priced already.

        Each runs behind its own backward, where the software reduces behind computation at all. FSDP's SHARD_GRAD_OP
        gathers parameters for each micro-batch besides, DeepSpeed once a step: that is not priced.
        """
        sums = travelling(outcome, [each for each in outcome.messages() if each.finishes])
        scatters = [(self._scatter_s(each, outcome.links), outcome.links.overlap(each.axis)) for each in sums]
        hidable = sum(seconds * share for seconds, share in scatters) if self.stack.overlaps else 0.0
        shown = sum(seconds for seconds, _ in scatters) - min(hidable, outcome.phase_s("backward"))
        return (outcome.microbatches - 1) * shown

    @staticmethod
    def _scatter_s(message: Message, links: Links) -> float:
        """Return the seconds in which gradients are scattered, without the gathers of what is made of them."""
        return links.message_s(message) - links.renewed_within_s(message)

    def _outcome(self, one: Waiting, wishes: Wishes, solution: Solution) -> Solved:
        outcome = self.outcome(one, wishes, solution)
        if one.trial.depth == 1:
            return Solved(one.trial, solution, outcome, outcome.step_s)
        wanted = replace(wishes.wanted(one.trial.depth), even=True)
        cut = pipelined(outcome, (wanted,), self.places(one.trial.depth))
        if isinstance(cut, NoCut):
            return Solved(one.trial, solution, why_not="no cut into stages")
        return Solved(one.trial, solution, outcome, cut.step_s, pipeline=cut)


def _longer(found: Estimates, more_s: float) -> Estimates:
    """Return the estimates of a step in which communication shows for so much longer."""
    breakdown = replace(found.breakdown, exposed_communication_s=found.breakdown.exposed_communication_s + more_s)
    step_s = found.step_time_s + more_s
    return replace(found, step_time_s=step_s, mfu=found.mfu * found.step_time_s / step_s, breakdown=breakdown)


def _offloaded_bytes(outcome: Outcome, blocks: int) -> float:
    """Return by how much the peak is lower where the first blocks' activations wait in the host's memory."""
    paths = [[each.path] for each in units(outcome.graph)]
    away = BlockMemory(outcome, stage_of(outcome.graph, paths), len(paths)).away(blocks)
    curve = outcome.memory_curve
    return float(curve.max() - (curve - away).max())


def _smaller(found: Estimates, less_bytes: float) -> Estimates:
    """Return the estimates of a step that holds so much less of activations at the peak."""
    less = min(round(less_bytes), found.memory.activations)
    memory = replace(found.memory, activations=found.memory.activations - less)
    return replace(found, memory=memory, peak_memory_bytes=found.peak_memory_bytes - less)


def _axis(trial: Trial, role: str) -> int:
    """Return the place of the axis of a role in a trial's mesh; -1: it has none."""
    return next((place for place, axis in enumerate(trial.mesh) if axis.role == role), -1)


def _block_bytes(graph: Graph, split: int) -> int:
    """Return the bytes of one block's parameters on a tensor-parallel rank, the mean over the program's blocks."""
    trained = [op.outputs[0] for op in graph.ops if op.kind == "parameter" and op.requires_grad]
    return round(sum(meta.nbytes for meta in trained if meta is not None) / len(units(graph)) / split)


def _has_short_parameters(graph: Graph) -> bool:
    """Return whether a trained parameter has fewer than 32 bits an element."""
    trained = (op.outputs[0] for op in graph.ops if op.kind == "parameter" and op.requires_grad)
    return any(meta is not None and meta.is_floating and meta.item_bytes < 4 for meta in trained)
