"""What may be chosen: variants, shapes, GPUs, parameters and the predicates that prune them.

Standard library only; every other package may import this one.
"""
