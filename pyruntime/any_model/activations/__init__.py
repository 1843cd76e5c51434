"""How activations reach parallel linears: one input read by several, and rows cut over the ranks where the
model's code reads all of them."""
