"""The trainer's step in virtual time: the real program, on a simulated GPU."""
