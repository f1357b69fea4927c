"""A pipeline schedule and what its stages cost become a timeline and a memory curve; broken schedules are found.

`generators.generate` makes a schedule by name, `engine.simulate` runs it on paper, `check.check` proves that it can
run at all. Nothing here knows torch.
"""
