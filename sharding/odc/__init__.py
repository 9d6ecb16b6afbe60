"""On-demand communication: FSDP as a decentralised parameter server (Wan et al., "Revisiting Parameter Server in LLM
Post-Training").

Every device is a worker, which walks the layers at its own pace, and an owner of slices of the weights. Workers fetch
parameters from the owners when needed, and push gradients to the owners, which add the gradients up. Devices wait for
each other once in each minibatch, not twice in each layer.
"""


class OdcError(RuntimeError):
    """A device failed within a minibatch, or a process was lost. The message names the device or process, the stage and
    the reason. Parameters are unchanged. A single process may try the next minibatch, but several processes must all
    end."""
