"""What every rank would do for the first time, done once: importing it leaves torch, transformers' tracing and
autopar with what they load and remember at the first capture, plan, rewriting and step.

For a process from which ranks are forked. It starts no threads and joins no process group: builds of torch with
devices start some at the first backward, which captures have, so that there nothing is done ahead.
"""

from __future__ import annotations

import gc

import torch
from tqdm import tqdm

import autopar
from autopar.capture import capture
from autopar.rewrite import rewrite
from tests.support.models import Mlp
from tests.support.training import call, loss_of

torch.set_num_threads(1)
tqdm.monitor_interval = 0  # of transformations of fx graphs: it would be a thread


def _warm() -> None:
    with torch.random.fork_rng(devices=[]):
        model, example = Mlp(), (torch.randn(8, 8), torch.randint(0, 4, (8,)))
        captured = capture(model, example, training=True)
        for fix in ({"dp_shard": 2, "zero": 3}, {"pp": 2, "microbatch": 4}):
            plan = autopar.plan(model, "cpu:2", example_inputs=example, fix=fix)
            if "pp" not in fix:
                rewrite(captured.joint, captured.graph, plan.decisions, 0)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(call(model, example)).backward()
        optimizer.step()


if torch.version.cuda is None and torch.version.hip is None:
    _warm()
gc.collect()
gc.freeze()  # what is here stays, in every fork
gc.set_threshold(50_000, 20, 20)
