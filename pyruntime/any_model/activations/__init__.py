"""Makes activations around parallel linears cheaper: linears that read one input run as one op, and norms and
residuals run on a rank's rows. The model's code still sees whole tensors."""
