"""Programs on ranks: process groups, parameters as DTensors, and the module that runs a step.

    ranks = Ranks.join("cpu")                       # torchrun, an existing process group, or alone
    plan = ranks.from_first(plan_text)              # every rank gets rank 0's
    ranks.agree("captured program", graph.fingerprint)
    runner = Runner(decisions, ranks, program_for)  # program_for(training, grad, args, kwargs) -> Program
    model = compiled(model, runner)

Where programs are cut into stages or micro-batches, all but the first three lines become

    pipeline = PipelineRanks.of(mesh, schedule.ranks, ranks)          # mesh: of one pipeline rank
    runner = Runner(decisions, ranks, program_for, pipeline=pipeline) # program_for returns a PipelinedProgram
    names = names_on_rank(staged, placeholders, schedule, pipeline.index, model)
    model = compiled(model, runner, names=names)

What can fail on one rank only (capture, planning) belongs in `with ranks.together("capture the model"):`,
so that all ranks stop when one does.
"""

from autopar.runtime import experts as _experts  # noqa: F401  gives programs its operators, as the next one does
from autopar.runtime import two_level as _two_level  # noqa: F401
from autopar.runtime.module import ProgramFor, Runner, compiled, input_part
from autopar.runtime.parameters import InitFn
from autopar.runtime.pipeline_ranks import PipelineRanks
from autopar.runtime.program import Program
from autopar.runtime.ranks import Groups, Ranks
from autopar.runtime.staged_program import PipelinedProgram, names_on_rank

__all__ = [
    "Groups",
    "InitFn",
    "PipelineRanks",
    "PipelinedProgram",
    "Program",
    "ProgramFor",
    "Ranks",
    "Runner",
    "compiled",
    "input_part",
    "names_on_rank",
]
