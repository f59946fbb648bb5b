"""A call as a value: tensors, settings, gradients, checks, problem, plan."""
