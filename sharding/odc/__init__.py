"""On-demand communication: FSDP as a decentralised parameter server (Wan et al., "Revisiting Parameter Server in LLM
Post-Training").

Every device is a worker that walks the layers at its own pace, and the server of its slices of the weights: parameters
are fetched from their owners when a worker needs them, gradients pushed to the owners, which add them up. Devices wait
for one another once a minibatch instead of twice a layer.
"""

from .executor import Odc, OdcError

__all__ = ["Odc", "OdcError"]
