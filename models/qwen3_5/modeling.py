"""Qwen3.5: a decoder with layers of Gated DeltaNet and layers of gated attention.

`Qwen35Text` is the decoder alone. `Qwen35` also has the tower of Qwen3-VL, and reads only the last layer of the tower.
"""

from flax import nnx
from jax import Array
from jaxtyping import Float

from sharding.walk import Stack

from ..config import DecoderConfig, TextConfig
from ..decoder import Aux, Decoder, Mix, Rotary
from ..deltanet import GatedDeltaNet
from ..layers import GatedMLP, RMSNorm
from ..qwen2_5_vl.modeling import Qwen25VL
from ..qwen3_vl.modeling import DeepVisionTower


class DeltaLayer(nnx.Module):
    """A decoder layer with Gated DeltaNet in the place of attention."""

    def __init__(self, config: TextConfig, stack: int | None = None) -> None:
        D, F, eps, std = config.hidden_size, config.intermediate_size, config.rms_norm_eps, config.initializer_range
        assert config.delta is not None
        self.delta_norm = RMSNorm(D, eps, stack, zero_centred=config.zero_centred_norms)
        self.delta = GatedDeltaNet(D, config.delta, eps=eps, std=std, stack=stack)
        self.mlp_norm = RMSNorm(D, eps, stack, zero_centred=config.zero_centred_norms)
        self.mlp = GatedMLP(D, F, bias=False, std=std, stack=stack)

    def __call__(self, x: Float[Array, "B T D"], rotary: Rotary, mix: Mix[Aux]) -> tuple[Float[Array, "B T D"], Aux]:
        """Ignores `rotary`, because the state meets the tokens in their order."""
        assert mix.delta is not None
        out, aux = self.delta(self.delta_norm(x), mix.delta)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), aux


class Qwen35Text(Decoder):
    """The model `Qwen3_5ForCausalLM` of transformers."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.delta_layers = DeltaLayer(config.text, stack=len(config.text.delta_layers))

    @property
    def stack(self) -> Stack:
        text = self.config.text
        kinds = ("layers" if layer in text.attention_layers else "delta_layers" for layer in range(text.num_layers))
        return Stack({"layers": self.layers, "delta_layers": self.delta_layers}, tuple(kinds))


class Qwen35(Qwen35Text, Qwen25VL):
    """The model `Qwen3_5ForConditionalGeneration` of transformers."""

    tower = DeepVisionTower
