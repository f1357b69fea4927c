"""Physics of training on a cluster: numbers in, numbers out.

A leaf package: numpy, sympy and pyyaml only; neither torch nor autopar. Units
are SI and named in every identifier (`_s`, `_bytes`, `_bytes_per_s`, `_flops`).

    units        text with a unit <-> number
    formula      a formula once, to print and to evaluate
    catalog      published and measured figures, each with unit, source and kind
    device       one accelerator or CPU core
    cluster      the described machine: devices, nodes, network levels
    topology     how the ranks of one mesh axis lie on the link levels
    collectives  time of a collective over such hops
    compute      time of matmuls, attention and memory-bound work
    memory       bytes of state per parameter, allocator rounding
    overlap      communication left exposed beside computation

Import the submodule that is needed; this file imports nothing, so that
`import cost_models.cluster` stays fast.
"""
