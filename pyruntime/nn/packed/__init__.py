"""Linears that hold several (q, k and v; gate and up), of which each is cut over the ranks by itself."""
