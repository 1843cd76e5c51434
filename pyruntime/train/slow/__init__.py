"""Which rank computes slowly, which link sends slowly, and layers that move away from a slow rank."""
