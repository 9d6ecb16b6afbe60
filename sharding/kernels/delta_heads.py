"""The heads of a layer of Gated DeltaNet (`sharding.kernels.delta`), in a module that does not import JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DeltaHeads:
    """The heads of a layer. Value head `i` uses the queries and keys of key head `i // (value_heads / key_heads)`.
    Raises ValueError if `value_heads` is no multiple of `key_heads`."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.value_heads} value heads must be a multiple of {self.key_heads} key heads")

    @property
    def channels(self) -> int:
        """The number of channels of the convolution, which are queries, keys and values of all heads, in this order."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
