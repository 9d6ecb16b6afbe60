"""Planners: on which devices each sequence of a microbatch, and each unit of the vision tower, is computed. numpy only.

plan = flex_ulysses([9000, 120, 4000, 310], num_devices=4, limits=Limits(num_heads=28))
print(plan.balance)
"""
