"""From a call to a backend: operators, autograd, planner."""
