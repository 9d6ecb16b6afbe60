"""How work and weights are spread over devices. Knows no model, no algorithm and no configuration."""
