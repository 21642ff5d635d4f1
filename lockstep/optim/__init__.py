"""Second-order steps on trees of parameters. They know no data: factors and gradients come in as means over lanes."""
