"""Plans the training of Llama-3-8B on 64 H100s, on a laptop: no GPU, no weights, no cluster.

    python examples/plan_llama3_8b.py -o llama.json

The same as `autopar plan zoo:llama3-8b -c h100-sxm-80gb:8x8 --batch 128 --seq 8192 --precision bf16`, from Python:
the model's parameters are on the meta device, so that its 16 GB are never allocated.
"""

import argparse
import sys

import autopar
from autopar.models import resolve
from autopar.report.table import print_table


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", help="where the plan goes")
    parser.add_argument("-c", "--cluster", default="h100-sxm-80gb:8x8")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seq", type=int, default=8192)
    args = parser.parse_args()

    found = resolve("zoo:llama3-8b", batch=args.batch, seq=args.seq, overrides={"layers": str(args.layers)})
    cluster = autopar.ClusterSpec.parse(args.cluster)
    plan = autopar.plan(
        found.model, cluster, example_inputs=found.example_inputs, precision="bf16", optimizer="adamw", batch=args.batch
    )
    print_table(plan, sys.stdout)
    if args.output:
        plan.save(args.output)


if __name__ == "__main__":
    main()
