"""From a model and one example batch to its program: joint forward and backward, as fx and as `ir.Graph`.

    captured = capture(model, (x, y))            # or a dict of keyword arguments; parameters may be on meta
    captured.graph                               # ir.Graph: ops named as the nodes of captured.joint
    captured.joint                          # fx.GraphModule, flat: takes the placeholders in order, and returns
                                            # a tuple that stands beside captured.graph.outputs, one for one
    captured.placeholders                   # what each is: parameter, buffer, input, tangent or constant
    captured.constants                      # value of each op of kind "constant", by op name
    captured.call.flatten(args, kwargs)     # a call's tensors, in the order of the input placeholders
    captured.result.rebuild(outputs)        # the model's return value, from the outputs of kind "output" in order

Capture happens on fake CPU tensors: nothing is allocated or computed, the model is only read, no random state moves.
"""

from autopar.capture.call import CallArguments, CallSpec, Input, ResultSpec
from autopar.capture.captured import Captured, batch_size, capture
from autopar.capture.lower import Placeholder

__all__ = ["CallArguments", "CallSpec", "Captured", "Input", "Placeholder", "ResultSpec", "batch_size", "capture"]
