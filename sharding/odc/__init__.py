"""On-demand communication: FSDP as a decentralised parameter server (Wan et al., "Revisiting Parameter Server in LLM
Post-Training").

Every device is a worker that walks the layers at its own pace, and a server of its slices of the weights. Workers fetch
parameters from their owners when they need them, and push gradients to the owners, which add them up. Devices wait for
each other once a minibatch instead of twice a layer.
"""


class OdcError(RuntimeError):
    """A device failed within a minibatch, or a process was lost. The message names it, the stage and the reason.

    Parameters are unchanged. A single process may try the next minibatch; several processes all have to end.
    """
