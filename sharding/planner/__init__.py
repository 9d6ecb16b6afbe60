"""Planners choose the devices of each sequence of a microbatch, and of each unit of the vision tower, with numpy only.

plan = flex_ulysses([9000, 120, 4000, 310], num_devices=4, limits=Limits(num_heads=28))
print(plan.balance)
"""
