"""On-demand communication: FSDP as a decentralised parameter server (`docs/parallelism.md`)."""


class OdcError(RuntimeError):
    """A device failed within a minibatch, or a process was lost. The message names the device or process, the stage and
    the reason. Parameters are unchanged. A single process may go on, but several processes must all end."""
