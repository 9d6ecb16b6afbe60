"""On-demand communication: FSDP as a decentralised parameter server (Wan et al., "Revisiting Parameter Server in LLM
Post-Training").

Every device is a worker that walks the layers at its own pace, and a server of its slices of the weights. Workers fetch
parameters from their owners when they need them, and push gradients to the owners, which add them up. Devices wait for
each other once a minibatch instead of twice a layer.
"""

from .executor import Odc, OdcError

__all__ = ["Odc", "OdcError"]
